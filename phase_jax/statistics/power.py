"""How many logical samples it takes to see a curve, and how surely a number of them sees it."""

import math

import numpy as np


def detection_power(curve, rows: int, *, correlation: float = 0.0, alpha: float = 0.05) -> float:
    """Chance that Cochran's Q (or the permutation test) rejects at `alpha`, for true accuracies `curve[R]`.

    `correlation` is that of two replicas of a logical sample (`row_correlation`): the more alike the
    replicas, the more the pairing within rows helps.
    """
    from statsmodels.stats.power import GofChisquarePower

    curve = np.asarray(curve, np.float64)
    return float(GofChisquarePower().power(_effect_size(curve, correlation), rows, alpha, n_bins=curve.size))


def samples_needed(curve, *, correlation: float = 0.0, alpha: float = 0.05, power: float = 0.8) -> int:
    """Logical samples needed to reject with probability `power`, for true accuracies `curve[R]`.

    "The n to see a gap of x points" is `samples_needed(one_phase_off(mean, x, stride, residues))`.
    Raises ValueError for a flat curve, which no number of samples shows.
    """
    from statsmodels.stats.power import GofChisquarePower

    curve = np.asarray(curve, np.float64)
    effect = _effect_size(curve, correlation)
    if effect == 0:
        raise ValueError("the curve is flat: no number of samples shows a gap of zero")
    nobs = GofChisquarePower().solve_power(effect_size=effect, alpha=alpha, power=power, n_bins=curve.size)
    return max(math.ceil(float(np.squeeze(nobs))), 1)


def _effect_size(curve, correlation: float) -> float:
    """Root of the noncentrality that one logical sample adds to Cochran's Q.

    Q is the sum of squares of the curve about its mean over the mean square within rows, times n; within a
    row the variance p (1 - p) loses its common part, and the curve itself adds to it.
    """
    if not 0 <= correlation < 1 or not np.all((curve >= 0) & (curve <= 1)):
        raise ValueError("power needs fractions between 0 and 1 and a correlation in [0, 1)")
    squares = ((curve - curve.mean()) ** 2).sum()
    within = (curve * (1 - curve)).mean() * (1 - correlation) + squares / (curve.size - 1)
    return math.sqrt(squares / within) if squares > 0 else 0.0
