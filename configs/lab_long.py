"""The lab at length: one layer that finds one of 1,024 records in a prompt of 4,224 tokens.

phase-jax train --config=configs/lab_long.py:kvc_w8s8_1kv_baseline --workdir=runs/long
phase-jax evaluate --workdir=runs/long --protocol=prefix --logical=48
"""

import dataclasses

from ml_collections import ConfigDict

from configs.family import as_config_dict, default_seed, model_config
from phase_jax.data.recall import RecallConfig
from phase_jax.errors import UserError
from phase_jax.run import RunConfig, TrainConfig
from phase_jax.training.optimizer import OptimizerConfig


def get_config(variant: str) -> ConfigDict:
    """The long run of one compressed id.

    Short prompts first, of many sequences: there the circuit forms, and what it has learned holds at any length, since
    three quarters of a head's channels know no position. All 1,024 keys from the start, but 64 names for their values:
    with 1,024 names it had barely begun after as many steps. Raises UserError for full attention, which needs two
    layers and several times the time.
    """
    data = RecallConfig(
        words=1024,
        names=64,
        records=1024,
        length=4224,
        demonstrations=0,
        closing_filler=16,
        queries=20,
        # (share of the steps, records, length, queries, sequences a step)
        curriculum=((0.6, 8, 64, 20, 32), (0.8, 128, 640, 120, 4), (1.0, 1024, 4224, 600, 1)),
    )
    model = model_config(variant, "lab")
    if model.windows is None:
        raise UserError(f"configs/lab_long.py is for compressed models, and {variant} is not one: use configs/lab.py")
    model = dataclasses.replace(
        model,
        layers=1,
        query_heads=max(2, model.kv_heads),
        head_dim=64,
        rope_dims=16 if model.rope_dims is None else model.rope_dims,
        vocabulary=data.vocabulary.size,
        embedding_std=0.15,
        attention_block=512,
    )
    train = TrainConfig(
        steps=500,
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=50, final_share=0.02),
        validation_batches=8,
    )
    return as_config_dict(RunConfig(variant, default_seed(variant), model, data, train))
