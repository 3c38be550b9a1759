"""Checkpoints of a run through Orbax: saved whole, checked when they are read, refused by name where they fail.

Beside the state, a checkpoint keeps what the run is a function of, where its data stand, and a checksum of every leaf,
since Orbax loads altered bytes without a word. The checksums do not depend on how arrays are spread over devices and
processes, so that a checkpoint of one topology is checked on any other.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from orbax.checkpoint import v1 as ocp

from phase_jax.errors import UserError
from phase_jax.progress import console
from phase_jax.run import RunConfig, config_differences
from phase_jax.training.processes import all_agree, wait_for_all
from phase_jax.training.step import TrainState


class Checkpoint(NamedTuple):
    """What a checkpoint gives back: the state, and what `save` was told about the data (None of an old checkpoint)."""

    state: TrainState
    data: dict | None


class Refused(Exception):
    """A checkpoint that must not be used; the message is the reason."""


@contextmanager
def open_checkpoints(folder: Path, keep: int | None = None) -> Iterator[ocp.training.Checkpointer]:
    """The checkpoints in `folder`, to be read, or to be written where `keep` says how many of the newest are kept.

    A writer removes what a killed save left behind; a reader leaves it alone, as a save may be going on.
    """
    logging.set_verbosity(logging.FATAL)  # Orbax tells every save and load; what it raises is enough
    policies = ocp.training.preservation_policies
    checkpoints = ocp.training.Checkpointer(
        folder.absolute(),
        save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
        preservation_policy=policies.LatestN(keep) if keep else policies.PreserveAll(),
        cleanup_tmp_directories=keep is not None,
    )
    try:
        yield checkpoints
    finally:
        with suppress(OSError, ValueError):  # every save was waited for; one that failed fails again here
            checkpoints.close()


def latest_step(checkpoints: ocp.training.Checkpointer) -> int | None:
    """Step of the newest complete checkpoint, or None."""
    return checkpoints.latest.step if checkpoints.latest else None


def save(checkpoints: ocp.training.Checkpointer, state: TrainState, config: RunConfig, data: dict) -> None:
    """Saves the state under its step and waits for the disk; `data` is JSON: where the run's data stand.

    Raises UserError where it cannot be written, with what is left to continue from; earlier checkpoints are untouched.
    """
    step, state = int(state.step), state._asdict()
    about = {"config": config.to_dict(), "data": data, "leaves": checksums(state)}
    about = json.loads(json.dumps(about))
    last = latest_step(checkpoints)
    try:
        checkpoints.save(step, state, custom_metadata={**about, "digest": _digest(about)})
    except (OSError, ValueError) as error:
        if jax.process_index() == 0:
            for torn in checkpoints.directory.glob(f"{step}.orbax-checkpoint-tmp*"):
                shutil.rmtree(torn, ignore_errors=True)
        kept = "there is none before it" if last is None else f"the last good one is of step {last}"
        reason = _one_line(error).rpartition('": ')[2]  # without the name of a temporary file
        raise UserError(
            f"the checkpoint of step {step} could not be written to {checkpoints.directory} ({reason}); {kept}: make"
            " room and run the same command again"
        ) from error


def restore(
    checkpoints: ocp.training.Checkpointer,
    like: TrainState,
    config: RunConfig,
    step: int | None = None,
    set_aside: bool = False,
) -> Checkpoint | None:
    """The newest checkpoint that can be trusted, with the tree, shapes, types and shardings of `like`; None of none.

    With `step`, that one alone. A leaf of `like` without a sharding goes to the first device. A checkpoint that is
    torn, altered or another run's is named on stderr with the reason, and the one before it is used; `set_aside` also
    renames it, so that it is in no save's way. Raises UserError where there are checkpoints and none can be used.
    """
    refused = []
    steps = [checkpoint.step for checkpoint in checkpoints.checkpoints] if step is None else [step]
    for step in reversed(steps):
        folder = checkpoints.directory / str(step)
        try:
            found = _restore_one(checkpoints, step, like, config)
        except Refused as reason:
            _say(f"{folder} is refused: {reason}")
            refused.append(folder)
            continue
        if refused and set_aside:
            if jax.process_index() == 0:
                for folder in refused:
                    folder.rename(_unused(folder.with_name(f"{folder.name}.refused")))
            wait_for_all("set aside")
            checkpoints.reload()
        return found
    if refused:
        raise UserError(
            f"no checkpoint in {checkpoints.directory} can be used, for the reasons above: remove it to begin again"
        )
    return None


def _restore_one(checkpoints: ocp.training.Checkpointer, step: int, like: TrainState, config: RunConfig) -> Checkpoint:
    """The checkpoint of one step. Raises Refused, in all processes if in one."""
    first_device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or first_device), like._asdict()
    )
    state, reason = None, ""
    try:
        described = checkpoints.metadata(step)
        about = described.custom_metadata
        if about:
            _check_description(about, config)
        elif described.commit_timestamp_nsecs is None:
            raise Refused("its description is torn")
        state = checkpoints.load(step, target)
    except Refused as error:
        reason = str(error)
    except (MemoryError, jax.errors.JaxRuntimeError):
        raise  # these say nothing about the checkpoint
    except Exception as error:  # Orbax raises anything on what it cannot read
        reason = f"it is torn, or no checkpoint of such a model ({_one_line(error)})"
    if not all_agree(state is not None):
        raise Refused(reason or "another process could not read it")
    if not about:
        _say(f"{checkpoints.directory / str(step)} was saved without checksums: used as it is")
        return Checkpoint(TrainState(**state), None)
    found = checksums(state)
    altered = [name for name in found if found[name] != about["leaves"].get(name)]
    if altered:
        more = f" and {len(altered) - 1} more" if len(altered) > 1 else ""
        raise Refused(f"{altered[0]}{more} differs from its checksum")
    return Checkpoint(TrainState(**state), about["data"])


def _check_description(about: dict, config: RunConfig) -> None:
    """Raises Refused where what a checkpoint says of itself was altered, or tells of another run."""
    if about.get("digest") != _digest({name: value for name, value in about.items() if name != "digest"}):
        raise Refused("its description differs from its checksum")
    if differs := config_differences(about["config"], config):
        raise Refused(f"it is of another run ({'; '.join(differs[:3])})")


def checksums(tree: Any) -> dict[str, str]:
    """Type, shape and 64-bit checksum of every leaf, by its path.

    Each number's bits are mixed with its place in the array, and the results added up modulo 2³², twice: a sum does not
    depend on who holds which part. A change of one number always changes both sums, since mixing is a bijection; any
    other goes unseen once in 2⁶⁴. Arrays may be spread over devices and processes; nothing is gathered.
    """
    named = jax.tree_util.tree_leaves_with_path(tree)
    sums = jax.device_get(_sums([leaf for _, leaf in named]))
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype}{list(leaf.shape)} {high:08x}{low:08x}"
        for (path, leaf), (high, low) in zip(named, sums, strict=True)
    }


@jax.jit
def _sums(leaves: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
    """The two sums of each leaf."""

    def summed(leaf):
        bits = jax.lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}").astype(jnp.uint32)
        place = jnp.zeros((), jnp.uint32)
        for axis, size in enumerate(leaf.shape):
            place = place * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
        return tuple(_mix(bits ^ _mix(place ^ np.uint32(seed))).sum(dtype=jnp.uint32) for seed in (0, 0x9E3779B9))

    return [summed(leaf) for leaf in leaves]


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of 32 bits in which every bit of the result depends on all: the finaliser of MurmurHash3."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _digest(about: dict) -> str:
    """SHA-256 of JSON content."""
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _say(line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _one_line(error: Exception) -> str:
    """The first line of what an error says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _unused(path: Path) -> Path:
    """The path, or with a number after it where it is taken."""
    return next(p for p in (path, *(path.with_name(f"{path.name}{n}") for n in range(2, 1000))) if not p.exists())
