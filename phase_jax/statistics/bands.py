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
from phase_jax.statistics.dependence import column_correlation
from phase_jax.statistics.intervals import clopper_pearson


def worst_interval(correct, *, confidence: float = 0.95, replicates: int = 2000, seed: int = 0):
    """Interval `(low, high)` of the accuracy of the worst residue of `correct[N, R]`.

    Both sides are exact (Clopper-Pearson) in every cell, for scores and errors normal in shape miss half
    the time where failures are rare (accuracy 0.99, n = 30). Low: the smallest pointwise bound. High: the
    smallest upper bound at the critical value of the studentised maximum over cells, from the multiplier
    bootstrap: row residuals times independent normal numbers, which is a normal vector with the cells'
    correlations. A cell that never varies counts as independent of the rest.
    """
    correct = as_correct(correct)
    rows, residues = correct.shape
    side = (1 - confidence) / 2
    hits = correct.sum(axis=0)
    correlation = np.nan_to_num(column_correlation(correct))
    np.fill_diagonal(correlation, 1.0)
    rng = np.random.default_rng(seed)
    deviations = rng.multivariate_normal(np.zeros(residues), correlation, size=replicates, method="eigh")
    critical = np.quantile(deviations.max(axis=1), 1 - side)
    low = clopper_pearson(hits, rows, confidence)[0].min()
    high = clopper_pearson(hits, rows, 1 - 2 * stats.norm.sf(critical))[1].min()
    return float(low), float(high)


def gap_interval(correct, *, confidence: float = 0.95, replicates: int = 2000, seed: int = 0):
    """Interval `(low, high)` of the gap max_r A_r - min_r A_r of `correct[N, R]`.

    All differences are paired: both residues saw the same logical samples. Low: the largest of the lower
    bounds d_rs - c se_rs, where c is the critical value of the max-statistic max_rs |d*_rs - d_rs| / se*_rs
    over row resamples. High: the largest of the pointwise upper bounds.
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
    # With very few rows a resample hardly varies; the pointwise value is a floor.
    critical = max(stats.norm.isf(side), float(np.quantile(np.concatenate(largest), 1 - side)))
    low = (np.abs(difference) - critical * error).max()
    return float(np.clip(low, 0, 1)), float(_upper_differences(correct, confidence).max())


def gap_change_interval(first, second, *, confidence: float = 0.95, replicates: int = 2000, seed: int = 0):
    """Interval `(low, high)` of gap(first) - gap(second), for `[N, R]` over the same logical samples.

    Each side is the tighter of two bounds. One is the difference of the two gaps' own bounds. The other is
    paired: at the pair (r, s) of the first one's extremes, gap(first) - gap(second) is at most (first_r -
    first_s) - (second_r - second_s), so the largest upper bound of that contrast over the pairs that may be
    the extremes (those whose upper bound reaches the gap's lower one) holds too; likewise below, at the second
    one's. Where nearly all answers agree it is narrow. The four events that can fail a side share its error.
    """
    first, second = as_correct(first), as_correct(second)
    side = (1 - confidence) / 2
    each = 1 - side / 2
    lows, highs = zip(
        *(gap_interval(correct, confidence=each, replicates=replicates, seed=seed) for correct in (first, second)),
        strict=True,
    )
    change = first.astype(np.float64) - second
    # Sums of x = change_r - change_s and of its square; one half added to the count of +1 and of -1, as above.
    products, sums, rows = change.T @ change, change.sum(axis=0), len(change) + 2
    squares = np.diag(products)[:, None] + np.diag(products) - 2 * products
    net = sums[:, None] - sums
    centre, error = net / rows, np.sqrt(squares + 1 - net**2 / rows) / rows
    reach = stats.norm.isf(side / 4) * error
    above = _upper_differences(first, each) >= lows[0]
    below = _upper_differences(second, each) >= lows[1]
    low = max(lows[0] - highs[1], (centre - reach)[below].min())
    high = min(highs[0] - lows[1], (centre + reach)[above].max())
    return float(low), float(high)


def _paired_difference(hits, both, rows: int, first, second):
    """Difference of paired proportions and its error, with 1/2 added to each cell so that no error is zero.

    Source: Agresti and Min 2005.
    """
    only_first, only_second = hits[..., first] - both, hits[..., second] - both
    total = rows + 2
    net = only_first - only_second
    return net / total, np.sqrt(only_first + only_second + 1 - net * net / total) / total


def _upper_differences(correct, confidence: float) -> np.ndarray:
    """Pointwise upper bounds `[R, R]` of A_r - A_s from the exact bounds of the two, squared and added.

    Unlike a standard error, that stays right where a cell has no error at all: with one residue at 0.98, the
    others at 1 and n = 100, d + 1.96 se falls short of the gap 13 % of the time. Sources: Newcombe 1998
    (paired, method 10), Zou and Donner 2008.
    """
    rows = len(correct)
    hits = correct.sum(axis=0)
    accuracy = hits / rows
    low, high = clopper_pearson(hits, rows, confidence)
    correlation = np.nan_to_num(column_correlation(correct))
    above, below = (high - accuracy)[:, None], (accuracy - low)[None, :]
    reach = np.sqrt(np.maximum(above**2 - 2 * correlation * above * below + below**2, 0))
    bounds = accuracy[:, None] - accuracy[None, :] + reach
    np.fill_diagonal(bounds, 0.0)
    return np.minimum(bounds, 1.0)
