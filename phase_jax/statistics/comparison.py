"""Two models on the same logical samples."""

from dataclasses import dataclass

import numpy as np

from phase_jax.statistics.arrays import as_correct
from phase_jax.statistics.bands import gap_interval, worst_interval
from phase_jax.statistics.bootstrap import mean_interval


@dataclass(frozen=True)
class Comparison:
    """First model minus second, in fractions, each with an interval `(low, high)`."""

    mean: float
    mean_interval: tuple[float, float]
    worst: float
    worst_interval: tuple[float, float]
    gap: float
    gap_interval: tuple[float, float]


def compare(first, second, *, confidence: float = 0.95, replicates: int = 2000, seed: int = 0) -> Comparison:
    """Differences of mean, worst and gap of two models, both `[N, R]` over the same logical samples.

    The means are compared within rows, so that the difficulty of a sample cancels. Worst and gap are
    extremes: an interval of their difference is the difference of their intervals, each at 1 - (1 -
    confidence) / 2, so that the two errors together stay below the nominal one (conservative). Raises
    ValueError for unlike shapes.
    """
    first, second = as_correct(first), as_correct(second)
    if first.shape != second.shape:
        raise ValueError(f"paired models need the same samples and residues: {first.shape} and {second.shape}")
    draws = {"replicates": replicates, "seed": seed}
    curves = first.mean(axis=0), second.mean(axis=0)
    differences = first.mean(axis=1) - second.mean(axis=1)
    each = {"confidence": (1 + confidence) / 2, **draws}
    return Comparison(
        mean=float(differences.mean()),
        mean_interval=mean_interval(differences, bounds=(-1.0, 1.0), confidence=confidence, **draws),
        worst=float(curves[0].min() - curves[1].min()),
        worst_interval=_minus(worst_interval(first, **each), worst_interval(second, **each)),
        gap=float(np.ptp(curves[0]) - np.ptp(curves[1])),
        gap_interval=_minus(gap_interval(first, **each), gap_interval(second, **each)),
    )


def _minus(first: tuple[float, float], second: tuple[float, float]) -> tuple[float, float]:
    return first[0] - second[1], first[1] - second[0]
