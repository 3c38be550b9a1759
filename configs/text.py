"""Language models of the lab's size, on bytes of text.

    phase-jax corpus --out corpora/python-docs
    phase-jax train --config=configs/text.py:kvc_w8s8_1kv_baseline --workdir=runs/text/w8s8

Expected: docs/text.md has the losses; `phase-jax text` trains full attention and W8/S8 side by side.
"""

import dataclasses

from ml_collections import ConfigDict

from configs.family import as_config_dict, default_seed, model_config
from phase_jax.data.corpus import TextConfig
from phase_jax.data.tokenizers import ByteTokenizer
from phase_jax.run import RunConfig, TrainConfig
from phase_jax.training.optimizer import OptimizerConfig


def get_config(variant: str) -> ConfigDict:
    """The run of one id: the lab's backbone, bytes for tokens, the same data and recipe for all."""
    model = dataclasses.replace(model_config(variant, "lab"), vocabulary=ByteTokenizer.size, rope_theta=1000.0)
    run = RunConfig(
        id=variant,
        seed=default_seed(variant),
        model=model,
        data=TextConfig(corpus="corpora/python-docs", length=256),
        train=TrainConfig(
            steps=1000,
            batch=16,
            optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=100, final_share=0.02),
            checkpoint_every=100,
            validate_every=100,
            loss_spike=1.0,
        ),
    )
    return as_config_dict(run)
