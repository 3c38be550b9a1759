"""Runs so small that training one takes seconds, most of them compilation."""

import dataclasses

from phase_jax.data.recall import RecallConfig
from phase_jax.run import RunConfig, RunFolder, TrainConfig, write_json
from phase_jax.training.optimizer import OptimizerConfig
from tests.model.tiny import tiny_config

WORDS, STEPS = 8, 12


def tiny_run(variant="kvc_w4s4_1kv", *, data=None, train=None, model=None) -> RunConfig:
    """A run of 12 steps, a checkpoint every 4, a stage of 4 steps and one of 8; changes by part."""
    task = RecallConfig(
        words=WORDS,
        records=4,
        length=87,
        demonstrations=3,
        closing_filler=7,
        queries=4,
        curriculum=((1 / 3, 3, 20), (1.0, 4, 28)),
    )
    training = TrainConfig(
        steps=STEPS,
        batch=4,
        first_layer_weight=0.2,
        optimizer=OptimizerConfig(warmup_steps=2),
        log_every=1,
        checkpoint_every=4,
        validation_batches=2,
    )
    return RunConfig(
        id=variant,
        seed=7,
        model=tiny_config(variant, **{"layers": 1, "vocabulary": task.vocabulary.size, **(model or {})}),
        data=dataclasses.replace(task, **(data or {})),
        train=dataclasses.replace(training, **(train or {})),
    )


def as_if_trained(path, variant="kvc_w4s4_1kv", **changes) -> RunFolder:
    """The folder of a tiny run that says that it is trained; there are no parameters."""
    folder = RunFolder(path)
    folder.claim(tiny_run(variant, **changes))
    write_json(folder.training, {"steps": STEPS, "validation_loss": 1.0, "seconds": 1.0, "resumed_from": None})
    return folder
