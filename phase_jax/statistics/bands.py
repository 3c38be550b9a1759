"""Intervals for the worst residue and for the gap, from studentised max-statistic bootstrap bands.

The smallest of R noisy accuracies is too small and their range too large, in the sample and again in every
resample, so percentiles of min and max cover next to nothing. Bounds on all cells, or on all pairwise
differences, do better:

* worst = min_r A_r. An upper bound must hold below every A_r at once, so it needs simultaneous bounds: the
  smallest of R upper bounds whose joint error a max-statistic keeps. A lower bound needs none: the smallest
  of R lower bounds is below the lower bound of the truly worst cell, and that one alone errs with its own
  probability.
* gap = max_rs (A_r - A_s). For the same reason the lower bound is the largest of simultaneous lower bounds
  of the differences, and the upper bound the largest of their pointwise upper bounds.

Each side errs with at most half of 1 - confidence. `calibrate` measures it.
"""

import numpy as np
from scipy import stats

from phase_jax.statistics.arrays import as_correct
from phase_jax.statistics.bootstrap import row_counts
from phase_jax.statistics.intervals import clopper_pearson, wilson


def worst_interval(correct, *, confidence: float = 0.95, replicates: int = 2000, seed: int = 0):
    """Interval `(low, high)` of the accuracy of the worst residue of `correct[N, R]`.

    Low: the smallest Clopper-Pearson bound (exact, pointwise). High: the smallest Wilson upper bound at the
    critical value of the max-statistic max_r (A_r - A*_r) / sqrt(A_r (1 - A_r) / n) over row resamples A*;
    with the truth in the place of A, that is the score which Wilson's interval inverts.
    """
    correct = as_correct(correct)
    rows = len(correct)
    side = (1 - confidence) / 2
    hits = correct.sum(axis=0)
    accuracy = hits / rows
    error = np.sqrt(accuracy * (1 - accuracy) / rows)
    varies = error > 0
    low = clopper_pearson(hits, rows, confidence)[0].min()
    critical = stats.norm.isf(side)
    if varies.any():
        rng = np.random.default_rng(seed)
        values = correct[:, varies].astype(np.float32)
        curves = np.concatenate([counts @ values for counts in row_counts(rows, replicates, rng)]) / rows
        largest = ((accuracy[varies] - curves) / error[varies]).max(axis=1)
        # Cells without any error (or any success) cannot vary in a resample; the pointwise value is a floor.
        critical = max(critical, float(np.quantile(largest, 1 - side)))
    high = wilson(hits, rows, 1 - 2 * stats.norm.sf(critical))[1].min()
    return float(low), float(high)


def gap_interval(correct, *, confidence: float = 0.95, replicates: int = 2000, seed: int = 0):
    """Interval `(low, high)` of the gap max_r A_r - min_r A_r of `correct[N, R]`.

    Differences are paired (both residues saw the same logical samples) and have Agresti and Min's half
    counts, so that no standard error is ever zero. The max-statistic is max_rs |d*_rs - d_rs| / se*_rs over
    row resamples.
    """
    correct = as_correct(correct)
    rows, residues = correct.shape
    side = (1 - confidence) / 2
    first, second = np.triu_indices(residues, k=1)
    both = correct[:, first] & correct[:, second]
    hits = correct.sum(axis=0).astype(np.float64)
    difference, error = _paired_difference(hits, both.sum(axis=0), rows, first, second)
    values = np.hstack([correct, both]).astype(np.float32)
    largest = []
    for counts in row_counts(rows, replicates, np.random.default_rng(seed)):
        sums = counts @ values
        again, again_error = _paired_difference(sums[:, :residues], sums[:, residues:], rows, first, second)
        largest.append((np.abs(again - difference) / again_error).max(axis=1))
    pointwise = stats.norm.isf(side)
    # With very few rows a resample hardly varies; the pointwise value is a floor.
    critical = max(pointwise, float(np.quantile(np.concatenate(largest), 1 - side)))
    low = (np.abs(difference) - critical * error).max()
    high = (np.abs(difference) + pointwise * error).max()
    return float(np.clip(low, 0, 1)), float(np.clip(high, 0, 1))


def _paired_difference(hits, both, rows: int, first, second):
    """Difference of paired proportions, 1/2 added to each cell (Agresti and Min 2005), and its error."""
    only_first, only_second = hits[..., first] - both, hits[..., second] - both
    total = rows + 2
    net = only_first - only_second
    return net / total, np.sqrt(only_first + only_second + 1 - net * net / total) / total
