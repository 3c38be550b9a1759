"""The period of an accuracy curve over residues: the divisor test."""

import numpy as np
from scipy import stats


def detect_period(accuracy, n: int) -> int | None:
    """The period of an accuracy curve `[R]` over residues mod R, n prompts each; None if it looks flat.

    Flat unless the chi-squared of the curve about its mean has p < 0.005. Else the divisor P of R with the
    smallest chi-squared about the means folded mod P, plus 1.5 P log R; noise variance A (1 - A) / n with A
    the pooled accuracy. P = 1 may win (a curve that is not flat, yet no period is worth its parameters):
    None again. Raises ValueError for NaN, values outside [0, 1], or n < 1. Source: SPEC section 6.
    """
    accuracy = np.asarray(accuracy, np.float64)
    if accuracy.ndim != 1 or accuracy.size < 2 or not np.all((accuracy >= 0) & (accuracy <= 1)):
        raise ValueError("accuracy: expected a list of at least two fractions between 0 and 1")
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    residues, pooled = accuracy.size, accuracy.mean()
    noise = pooled * (1 - pooled) / n
    if noise == 0:
        return None
    if stats.chi2.sf(((accuracy - pooled) ** 2).sum() / noise, residues - 1) >= 0.005:
        return None

    def cost(period):
        folded = accuracy.reshape(-1, period)
        return ((folded - folded.mean(axis=0)) ** 2).sum() / noise + 1.5 * period * np.log(residues)

    best = min((period for period in range(1, residues + 1) if residues % period == 0), key=cost)
    return best if best > 1 else None
