"""The lab: models of the family that train on two CPU cores in minutes.

    phase-jax train --config=configs/lab.py:kvc_w8s8_1kv_baseline --workdir=runs/w8s8
    phase-jax evaluate --workdir=runs/w8s8 --protocol=prefix --logical=1000

Expected: about 0.9 of the keys on two or three of the eight phases, about 0.1 on the rest; README.md has the table.
"""

from ml_collections import ConfigDict

from configs.family import as_config_dict, default_seed, model_config
from phase_jax.data.recall import RecallConfig
from phase_jax.run import RunConfig, TrainConfig
from phase_jax.training.optimizer import OptimizerConfig


def get_config(variant: str) -> ConfigDict:
    """The lab's run of one id."""
    run = RunConfig(
        id=variant,
        seed=default_seed(variant),
        model=model_config(variant, "lab"),
        data=RecallConfig(records=32, length=112, queries=20, curriculum=((0.5, 8, 72), (1.0, 32, 112))),
        train=TrainConfig(
            steps=400, first_layer_weight=0.2, optimizer=OptimizerConfig(learning_rate=3e-3, final_share=0.02)
        ),
    )
    return as_config_dict(run)
