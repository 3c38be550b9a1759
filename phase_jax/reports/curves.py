"""Curves with 95 % bands, as figures and tables show them: over residues, and folded to phases."""

import dataclasses

import numpy as np

from phase_jax.reports.results import Result
from phase_jax.statistics import fold, mean_interval
from phase_jax.statistics.bootstrap import resampled_sums

REPLICATES = 2000


@dataclasses.dataclass(frozen=True)
class Band:
    """A curve and its 95 % bounds, which are None where nothing is known of them."""

    value: np.ndarray
    low: np.ndarray | None = None
    high: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Curves:
    """Accuracy, and where it is stored NLL, over `stride` phases (`folded`) or over residues."""

    accuracy: Band
    nll: Band | None
    folded: bool
    stride: int | None
    boundary: bool  # the last phase is a boundary phase: W = S


def unfolded(result: Result) -> Curves:
    """Over residues: Wilson's bounds of the accuracy, bootstrap bounds of the NLL where prompts are stored."""
    report = result.report
    accuracy = Band(*(np.array(report[name]) for name in ("accuracy", "wilson_low", "wilson_high")))
    return _curves(result, accuracy, report["residues"], folded=False)


def folded(result: Result) -> Curves | None:
    """Over phases; None for a model without a stride.

    A phase's bounds are those of a mean of logical samples' scores. Where prompts are not stored they are the means
    of its residues' bounds, which are too wide rather than too narrow: no correlation among replicas makes the mean
    of residues vary more than that.
    """
    report = result.report
    stride = report["S"]
    if stride is None:
        return None
    if result.scores is None:
        accuracy = Band(*(fold(report[name], stride) for name in ("accuracy", "wilson_low", "wilson_high")))
    else:
        rows = fold(result.scores["correct"], stride)
        low, high = np.transpose([mean_interval(column, replicates=REPLICATES) for column in rows.T])
        accuracy = Band(fold(report["accuracy"], stride), low, high)
    return _curves(result, accuracy, stride, folded=True)


def _curves(result: Result, accuracy: Band, period: int, *, folded: bool) -> Curves:
    report = result.report
    boundary = report["S"] is not None and report["W"] == report["S"] and report["S"] > 1
    return Curves(accuracy, _nll(result, period), folded, report["S"], boundary)


def _nll(result: Result, period: int) -> Band | None:
    """The NLL folded to `period`, with percentile bootstrap bounds over logical samples."""
    if result.report["nll"] is None:
        return None
    value = fold(result.report["nll"], period)
    if result.scores is None or "nll" not in result.scores:
        return Band(value)
    rows = fold(result.scores["nll"], period)
    means = resampled_sums(rows - value, REPLICATES, seed=0) / len(rows)
    low, high = np.quantile(means, (0.025, 0.975), axis=0)
    return Band(value, value + low, value + high)
