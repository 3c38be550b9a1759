"""Scores samples batch by batch over all devices; what was scored survives, and what failed is named.

A sample is a tuple of arrays, of the same shapes for all: its token ids, and what else its score is a function of.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from phase_jax.errors import UserError
from phase_jax.evaluation.journal import open_journal
from phase_jax.interrupt import deferred_interrupt
from phase_jax.progress import progress_bar

Sample = tuple[np.ndarray, ...]
_AXIS = "B"


def _devices() -> Mesh:
    return jax.make_mesh((jax.device_count(),), (_AXIS,), axis_types=(AxisType.Auto,))


def over_devices(score: Callable) -> Callable:
    """`score(shared, *arrays [B, …])` with the samples split evenly over all devices; its results have B first too.

    Each device runs `score` itself on its share, so its numbers do not depend on how many devices there are.
    """

    def split(shared, *arrays):
        return jax.shard_map(
            score,
            mesh=_devices(),
            in_specs=(PartitionSpec(), *[PartitionSpec(_AXIS)] * len(arrays)),
            out_specs=PartitionSpec(_AXIS),
            check_vma=False,  # nothing is communicated, and loops that begin with constants would not pass
        )(shared, *arrays)

    return split


def on_all_devices(params: dict) -> dict:
    """Parameters with a copy on each device, as `over_devices` wants them."""
    return jax.device_put(params, NamedSharding(_devices(), PartitionSpec()))


def fingerprint(settings: Mapping[str, Any], params: dict) -> bytes:
    """SHA-256 of all that scores depend on beside the samples: settings (as JSON) and every parameter."""
    leaves = jax.tree.leaves_with_path(params)
    text = json.dumps([settings, [jax.tree_util.keystr(path) for path, _ in leaves]], sort_keys=True)
    return _digest(text.encode(), (np.asarray(leaf) for _, leaf in leaves))


def _digest(begin: bytes, arrays: Iterable[np.ndarray]) -> bytes:
    """SHA-256 of `begin` and of arrays with their types and shapes."""
    digest = hashlib.sha256(begin)
    for array in arrays:
        digest.update(f"{array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.digest()


def score_samples(
    score: Callable[..., Mapping[str, jax.Array]],
    samples: Iterable[Sample],
    total: int,
    *,
    batch: int,
    made_of: bytes,
    label: str,
    journal: Path | None = None,
    unit: str = "logical samples",
) -> dict[str, np.ndarray]:
    """Scores of all `total` samples, in their order: {name: [total, …]}. Shows progress under `label`, in `unit`s.

    `score(*arrays [B, …])` gives a dict of arrays [B, …], for up to `batch` samples a device. Each batch's scores are
    appended to the file `journal` under hashes of its samples and of `made_of` (see `fingerprint`); a sample that is
    found there is not scored again. A batch that fails, or gives a number that is not finite, does not end the work,
    but there is no result without it: UserError then says how many are missing and names them. On Ctrl-C the batch
    under way is still finished.
    """
    devices = jax.device_count()
    size = devices * min(batch, -(-total // devices))
    order: list[bytes] = []
    failed: dict[str, Exception] = {}
    with open_journal(journal) as kept, deferred_interrupt() as interrupted, progress_bar() as bar:
        task = bar.add_task(label, total=total, note=unit)
        known = set(kept.scores)

        def unknown() -> Iterator[tuple[int, bytes, Sample]]:
            for number, sample in enumerate(samples):
                key = _digest(made_of, sample)
                order.append(key)
                if key in known:
                    bar.tasks[task].completed += 1  # not an update, which would count as speed
                else:
                    known.add(key)
                    yield number, key, sample

        rest = unknown()
        while chunk := list(itertools.islice(rest, size)):
            numbers, keys, chunk = zip(*chunk, strict=True)
            try:
                scores = _finite(jax.device_get(score(*_stack(chunk, size))))
            except Exception as error:
                name = f"{unit} {numbers[0]} to {numbers[-1]}"
                failed[name] = error
                bar.console.print(f"{label}: {name} failed: {_line(error)}", markup=False)
            else:
                kept.append(keys, {name: values[: len(keys)] for name, values in scores.items()})
            bar.update(task, advance=len(keys))
            if interrupted():
                bar.console.print(f"stopped after {len(order)} of {total}; the same command continues from there")
                raise KeyboardInterrupt
        assert len(order) == total
        missing = sum(key not in kept.scores for key in order)
        if missing == total:
            raise next(iter(failed.values()))
        if missing:
            named = [f"{name} ({_line(error)})" for name, error in failed.items()]
            more = [f"{len(named) - 3} more batches"] if len(named) > 3 else []
            raise UserError(
                f"{label}: {missing} of {total} {unit} are missing, so there is no result:"
                f" {'; '.join(named[:3] + more)}; the same command tries them again"
            )
        rows = [kept.scores[key] for key in order]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _stack(samples: Sequence[Sample], size: int) -> list[np.ndarray]:
    """Each part of the samples as one array [size, …], filled up with the last sample: one shape, one compilation."""
    filled = [*samples, *samples[-1:] * (size - len(samples))]
    return [np.stack(part) for part in zip(*filled, strict=True)]


def _finite(scores: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    for name, values in scores.items():
        if not np.isfinite(values).all():
            raise UserError(f"{name} is not a finite number: a parameter of the model is broken, or too large")
    return scores


def _line(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]
