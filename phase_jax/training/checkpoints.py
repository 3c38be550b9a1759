"""Checkpoints of a run through Orbax, behind four functions."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
from absl import logging
from orbax.checkpoint import v1 as ocp

from phase_jax.training.step import TrainState


@contextmanager
def open_checkpoints(folder: Path, keep: int) -> Iterator[ocp.training.Checkpointer]:
    """The checkpoints in `folder`; the newest `keep` are kept. Leaves only after the last save is on disk."""
    logging.set_verbosity(logging.ERROR)  # Orbax tells every save and load
    with ocp.training.Checkpointer(
        folder.absolute(),
        save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
        preservation_policy=ocp.training.preservation_policies.LatestN(keep),
        cleanup_tmp_directories=True,
    ) as checkpoints:
        yield checkpoints


def latest_step(checkpoints: ocp.training.Checkpointer) -> int | None:
    """Step of the newest complete checkpoint, or None."""
    return checkpoints.latest.step if checkpoints.latest else None


def save(checkpoints: ocp.training.Checkpointer, state: TrainState) -> None:
    """Saves the state under its step and waits for the disk."""
    checkpoints.save(int(state.step), state._asdict(), overwrite=True)


def restore(checkpoints: ocp.training.Checkpointer, step: int, like: TrainState) -> TrainState:
    """The state saved at `step` on the first device, with the tree, shapes and types of `like`."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), like._asdict())
    return TrainState(**checkpoints.load(step, target))
