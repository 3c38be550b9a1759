"""Gate cycling: does the accuracy curve move with the gates? (SPEC §7)

Gates cycled by δ should carry phase r − δ to phase r: A_δ(r) ≈ A_0((r − δ) mod S). Curves end with an axis of S phases.
Three sets of phases are compared: all, those without the boundary phase S − 1, and the interior, which is also without
(S − 1 + δ) mod S, where the boundary would have moved to.
"""

import numpy as np

from phase_jax.statistics.arrays import fold, to_json
from phase_jax.statistics.bootstrap import mean_interval, resampled_sums

_FEWEST_PHASES = 4


def predicted(clean, delta: int) -> np.ndarray:
    """The curve `clean[..., S]` moved by δ phases, around the window's end."""
    return np.roll(clean, delta, axis=-1)


def compared_phases(delta: int, stride: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The three sets of phases, as masks `[S]`: all, without the boundary, interior."""
    phase = np.arange(stride)
    inside = phase != stride - 1
    return np.ones(stride, bool), inside, inside & (phase != (stride - 1 + delta) % stride)


def r_squared(clean, cycled, delta: int, phases) -> np.ndarray | None:
    """Squared Pearson correlation `[...]` of predicted and observed changes over the masked phases.

    None for fewer than four phases, of which it would say nothing; NaN where either change is the same at all of them.
    """
    if np.count_nonzero(phases) < _FEWEST_PHASES:
        return None
    changes = ((curve - clean)[..., phases] for curve in (predicted(clean, delta), np.asarray(cycled)))
    first, second = (change - change.mean(axis=-1, keepdims=True) for change in changes)
    spread = (first**2).sum(axis=-1) * (second**2).sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(spread > 1e-12, (first * second).sum(axis=-1) ** 2 / spread, np.nan)


def absolute_error(clean, cycled, delta: int, phases) -> np.ndarray | None:
    """Mean distance `[...]` of the observed from the predicted curve over the masked phases; None if there is none."""
    if not phases.any():
        return None
    return np.abs(predicted(clean, delta) - cycled)[..., phases].mean(axis=-1)


def cycling_report(clean, cycled, delta: int, stride: int, *, replicates: int = 2000, seed: int = 0) -> dict:
    """What cycling by δ did, for right answers `[N, R]` without and with it to the same prompts; ready for JSON.

    `r2a`, `r2x`, `r2i` (R² of all, without boundary, interior), `maeA` and `maeI` are SPEC's names. Intervals are 95 %
    and of the bootstrap over logical samples, which are drawn together with and without cycling. `best` is the interior
    phase of the highest predicted accuracy, the one of the highest observed, and the share of the predicted accuracy
    that is found at the former; None where nothing interior is predicted.
    """
    clean, cycled = np.asarray(clean, np.float64), np.asarray(cycled, np.float64)
    rows = np.hstack([fold(clean, stride), fold(cycled, stride)])
    draws = resampled_sums(rows, replicates, seed).astype(np.float64) / len(rows)
    curves, sampled = np.split(rows.mean(axis=0), 2), np.split(draws, 2, axis=-1)
    result = {
        "delta": delta,
        "predicted": predicted(curves[0], delta),
        "observed": curves[1],
        "observed_interval": _interval(sampled[1]),
        "mean": curves[1].mean(),
        "change_of_mean": curves[1].mean() - curves[0].mean(),
        "change_of_mean_interval": mean_interval(
            cycled.mean(axis=1) - clean.mean(axis=1), bounds=(-1, 1), replicates=replicates, seed=seed
        ),
    }
    every, inside, interior = compared_phases(delta, stride)
    for name, measure, phases in (
        ("r2a", r_squared, every),
        ("r2x", r_squared, inside),
        ("r2i", r_squared, interior),
        ("maeA", absolute_error, every),
        ("maeI", absolute_error, interior),
    ):
        value = measure(*curves, delta, phases)
        result[name] = value
        result[f"{name}_interval"] = None if value is None else _interval(measure(*sampled, delta, phases))
    return to_json({**result, "best": _best(curves, sampled, delta, np.flatnonzero(interior))})


def _best(curves, sampled, delta: int, inner) -> dict | None:
    expected, observed = predicted(curves[0], delta), curves[1]
    if not inner.size or not expected[inner].any():
        return None
    place = inner[expected[inner].argmax()]
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = sampled[1][:, place] / predicted(sampled[0], delta)[:, place]
    return {
        "predicted_phase": place,
        "observed_phase": inner[observed[inner].argmax()],
        "share": observed[place] / expected[place],
        "share_interval": _interval(shares),
    }


def _interval(draws) -> np.ndarray | None:
    """95 % percentile bounds over the first axis, of those draws that have a value."""
    draws = draws[np.isfinite(draws).reshape(len(draws), -1).all(axis=1)]
    return np.quantile(draws, (0.025, 0.975), axis=0) if len(draws) else None
