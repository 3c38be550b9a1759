"""The period of a token-by-token sweep whose stride nobody knows: autocorrelation and DFT."""

from dataclasses import dataclass

import numpy as np
from scipy import fft, signal

SHORTEST = 16  # tokens; with fewer, even a perfect period of 4 is not much rarer than chance


@dataclass(frozen=True)
class SweepPeriod:
    """A period in tokens, and the harmonics k (of period / k tokens) that stand out in the DFT."""

    period: int
    harmonics: tuple[int, ...]
    p_value: float


def sweep_period(values, *, alpha: float = 0.05, permutations: int = 2000, seed: int = 0) -> SweepPeriod | None:
    """The period of `values[L]` (probabilities or log-odds, one a token), or None if nothing stands out.

    The straight trend is taken out. A period must stand out twice: in the autocorrelation, as a peak at a
    lag of 2 to L / 2, and in the DFT, at one of its harmonics; each against the largest such value of
    `permutations` shuffles of the sweep, at level `alpha`. A slow drift has neither: its autocorrelation
    falls without a peak. Among several such lags, that one is the period whose phase means explain the
    sweep best for their number (BIC). Raises ValueError for fewer than 16 or non-finite values.
    """
    values = np.asarray(values, np.float64)
    if values.ndim != 1 or values.size < SHORTEST:
        raise ValueError(f"a sweep needs a list of at least {SHORTEST} values, got shape {values.shape}")
    if not np.isfinite(values).all():
        raise ValueError("a sweep must be finite; clip probabilities of 0 and 1 before taking log-odds")
    residual = signal.detrend(values)
    if np.allclose(residual, 0, atol=1e-12 * max(1.0, np.abs(values).max())):
        return None
    rng = np.random.default_rng(seed)
    series = np.vstack([residual, rng.permuted(np.tile(residual, (permutations, 1)), axis=1)])
    lags = np.arange(2, values.size // 2 + 1)

    correlation = _autocorrelation(series)
    peaks = (correlation[0, lags] > correlation[0, lags - 1]) & (correlation[0, lags] > correlation[0, lags + 1])
    # Long lags have fewer pairs; in units of each lag's own spread under shuffling, all lags compare.
    score = correlation[:, lags]
    score = (score - score[1:].mean(axis=0)) / score[1:].std(axis=0)
    power = _power(series)
    highest = {"lag": score[1:].max(axis=1), "frequency": power[1:].max(axis=1)}
    ceiling = np.quantile(highest["frequency"], 1 - alpha)
    found = {
        int(lag): _harmonics(power[0], values.size, int(lag), ceiling)
        for lag in lags[peaks & (score[0] > np.quantile(highest["lag"], 1 - alpha))]
    }
    periods = [lag for lag, harmonics in found.items() if harmonics]
    if not periods:
        return None
    period = min(periods, key=lambda lag: _bic(values, lag))
    p_lag = _p_value(score[0, period - lags[0]], highest["lag"])
    return SweepPeriod(period, found[period], max(p_lag, _p_value(power[0].max(), highest["frequency"])))


def _autocorrelation(series) -> np.ndarray:
    """Autocorrelations `[..., L]` at lags 0 ... L - 1, over the whole sum of squares."""
    length = series.shape[-1]
    spectrum = np.abs(fft.rfft(series, n=2 * length)) ** 2
    products = fft.irfft(spectrum)[..., :length]
    return products / products[..., :1]


def _power(series) -> np.ndarray:
    """Share of the power at 0 ... L / 2 cycles; fewer than two cycles are no repetition and count as 0."""
    power = np.abs(fft.rfft(series)) ** 2
    power[..., :2] = 0
    # Every frequency but the highest of an even length stands for two terms of the full transform.
    inner = slice(2, None if series.shape[-1] % 2 else -1)
    power[..., inner] *= 2
    return power / (series.shape[-1] * (series**2).sum(axis=-1, keepdims=True))


def _p_value(observed: float, shuffled) -> float:
    return float((1 + np.count_nonzero(shuffled >= observed)) / (1 + len(shuffled)))


def _bic(values, period: int) -> float:
    """Bayesian information criterion of a straight trend plus one mean for each phase of `period`.

    The penalty has the small-sample factor of the corrected AIC (Hurvich and Tsai 1989): with 16 tokens
    plain BIC takes a multiple of the period one time in three.
    """
    length = values.size
    design = np.zeros((length, period + 1))
    design[np.arange(length), np.arange(length) % period] = 1
    design[:, -1] = np.linspace(-1, 1, length)
    fitted = design @ np.linalg.lstsq(design, values, rcond=None)[0]
    # The floor keeps two perfect fits apart by their number of parameters alone.
    noise = max(((values - fitted) ** 2).mean(), 1e-9 * values.var())
    penalty = (period + 1) * np.log(length) * length / (length - period - 2)
    return length * np.log(noise) + penalty


def _harmonics(power, length: int, period: int, ceiling: float) -> tuple[int, ...]:
    """Those k of 1 ... period / 2 for which the DFT bin nearest to k / period exceeds `ceiling`."""
    bins = {k: round(k * length / period) for k in range(1, period // 2 + 1)}
    return tuple(k for k, index in bins.items() if index < power.size and power[index] > ceiling)
