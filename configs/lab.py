"""The lab: models of the family that train on two CPU cores in minutes.

    phase-jax train --config=configs/lab.py:kvc_w8s8_1kv_baseline --workdir=runs/w8s8
    phase-jax evaluate --workdir=runs/w8s8 --protocol=prefix --logical=1000

Expected: about 0.9 of the keys on two or three of the eight phases, about 0.1 on the rest; README.md has the table.
"""

import dataclasses

from ml_collections import ConfigDict

from configs.family import as_config_dict, default_seed, model_config
from phase_jax.data.recall import RecallConfig
from phase_jax.run import RunConfig, TrainConfig
from phase_jax.training.optimizer import OptimizerConfig


def get_config(variant: str) -> ConfigDict:
    """The lab's run of one id.

    All see the same data. An entry of a compressed model holds key and value together, so one layer recalls, and the
    circuit comes within 300 steps from matrices of the usual size. Full attention has to build an induction circuit
    over two layers; it does so within 200 steps if its first layer is asked for the previous token and small matrices
    leave the embeddings audible, and not in 2,400 otherwise. With the same help the compressed models learn to merge a
    pair into one token, which hides the weak spots of W4/S4 and W8/S4 (README.md). Entries of twelve tokens and entries
    that cannot choose among theirs hold too much to be told apart without that: no recall in 1,840 steps, and in 920
    with it (docs/sweeps.md).
    """
    model = model_config(variant, "lab")
    full = model.windows is None
    crowded = model.window == 12 or model.gate == "uniform"
    run = RunConfig(
        id=variant,
        seed=default_seed(variant),
        model=dataclasses.replace(model, initial_std=0.02, embedding_std=0.045) if full else model,
        data=RecallConfig(records=24, length=96, queries=20, curriculum=((0.65, 8, 64), (1.0, 24, 96))),
        train=TrainConfig(
            steps=920 if crowded else 460,
            first_layer_weight=0.2 if full or crowded else 0.0,
            optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=50, final_share=0.02),
        ),
    )
    return as_config_dict(run)
