"""How the answers to replicas of one logical sample hang together."""

import numpy as np

from phase_jax.statistics.arrays import as_correct, fold


def column_correlation(values) -> np.ndarray:
    """Pearson correlations `[C, C]` of the columns of `values[N, C]`; NaN where a column never varies."""
    values = np.asarray(values, np.float64)
    if len(values) < 2:
        return np.full((values.shape[1],) * 2, np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.corrcoef(values, rowvar=False)


def failure_correlation(correct, stride: int | None = None) -> np.ndarray:
    """Correlation of failing at one residue and at another: `[R, R]`, or `[S, S]` by phase.

    It is over logical samples. By phase, the failures of the R / S replicas that share a phase are averaged
    first. NaN (null after `to_json`) where a phase never fails or always does: there the correlation has no
    meaning.
    """
    failures = 1.0 - as_correct(correct)
    return column_correlation(failures if stride is None else fold(failures, stride))


def row_correlation(correct) -> float:
    """Mean correlation between two replicas of a logical sample, from the spread of row sums.

    The variance of a row sum is the sum of all R^2 covariances. With it, the variances p (1 - p) of the
    residues give the mean covariance of two different ones, and over the mean variance the correlation. 0
    where nothing varies. It is what `samples_needed` wants.
    """
    correct = as_correct(correct)
    residues = correct.shape[1]
    variances = correct.var(axis=0)
    if variances.sum() == 0:
        return 0.0
    covariances = correct.sum(axis=1).var() - variances.sum()
    return float(covariances / (residues - 1) / variances.sum())
