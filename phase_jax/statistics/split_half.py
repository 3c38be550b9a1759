"""The accuracy of the worst phase, estimated on other rows than those that named it."""

from dataclasses import dataclass

import numpy as np

from phase_jax.statistics.arrays import as_correct, fold
from phase_jax.statistics.bootstrap import mean_interval


@dataclass(frozen=True)
class SplitHalf:
    """`phases` are those that each half named; `accuracy` is their accuracy on the respective other half."""

    phases: tuple[int, int]
    accuracy: float
    interval: tuple[float, float]


def split_half_worst(correct, stride: int | None = None, *, replicates: int = 2000, seed: int = 0) -> SplitHalf:
    """Each random half of the rows of `correct[N, R]` names its worst residue; the other half scores it.

    With a stride the worst phase (residue mod S) is sought. The smallest of R noisy numbers is too small; a
    score on rows that had no part in the choice is not. It estimates the accuracy of the phase that N / 2
    rows single out, which is at least that of the truly worst one. Raises ValueError for fewer than two
    rows.
    """
    correct = as_correct(correct)
    scores = correct.astype(np.float64) if stride is None else fold(correct, stride)
    rows = len(scores)
    if rows < 2:
        raise ValueError("a split into halves needs at least 2 logical samples")
    order = np.random.default_rng(seed).permutation(rows)
    halves = order[: rows // 2], order[rows // 2 :]
    phases = tuple(int(scores[half].mean(axis=0).argmin()) for half in halves)
    crossed = np.concatenate([scores[halves[1], phases[0]], scores[halves[0], phases[1]]])
    interval = mean_interval(crossed, replicates=replicates, seed=seed)
    return SplitHalf(phases, float(crossed.mean()), interval)
