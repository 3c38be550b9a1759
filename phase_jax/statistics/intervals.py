"""Intervals for one binomial proportion."""

import numpy as np


def wilson(k, n, confidence: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """Wilson's two-sided score interval for k successes in n independent trials, as arrays `(low, high)`.

    `k` and `n` broadcast. `k` may be fractional (a sum of scores in [0, 1]): a mean of such scores varies
    no more than a proportion does, so the interval is then wide but valid. Raises ValueError unless 0 <= k
    <= n and n >= 1. Source: Wilson 1927, as in statsmodels.
    """
    return _proportion_interval(k, n, confidence, "wilson")


def clopper_pearson(k, n, confidence: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    """The exact interval of Clopper and Pearson 1934: neither side misses more than (1 - confidence) / 2."""
    return _proportion_interval(k, n, confidence, "beta")


def _proportion_interval(k, n, confidence, method):
    # Importing statsmodels takes a second or two, which `phase-jax --help` need not pay.
    from statsmodels.stats.proportion import proportion_confint

    k, n = (array.copy() for array in np.broadcast_arrays(np.asarray(k, np.float64), np.asarray(n, np.float64)))
    if not (np.all(n >= 1) and np.all(k >= 0) and np.all(k <= n)):
        raise ValueError("a proportion needs n >= 1 trials and 0 <= k <= n successes")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    low, high = proportion_confint(k, n, alpha=1 - confidence, method=method)
    # At k = 0 and k = n rounding can leave a bound a hair outside its place, and the exact method gives NaN.
    low = np.where(k == 0, 0.0, low)
    high = np.where(k == n, 1.0, high)
    return np.clip(low, 0.0, 1.0), np.clip(high, 0.0, 1.0)
