"""The report of one model under one protocol: every number of SPEC section 6, ready for JSON."""

from dataclasses import asdict, dataclass

import numpy as np

from phase_jax.statistics.arrays import as_correct, check_stride, fold, to_json
from phase_jax.statistics.bands import gap_interval, worst_interval
from phase_jax.statistics.bootstrap import (
    curve_interval,
    gap_percentile_interval,
    mean_interval,
    sigma_interval,
)
from phase_jax.statistics.curves import summarise
from phase_jax.statistics.hypothesis_tests import permutation_test, verdict
from phase_jax.statistics.intervals import wilson
from phase_jax.statistics.period import detect_period


@dataclass(frozen=True)
class PhaseReport:
    """Fractions, not percent; None where a value has no meaning. Lists have one number a residue."""

    model: str | None
    W: int | None
    S: int | None
    kv_heads: int | None
    protocol: str | None
    residues: int
    n_logical: int
    validation_loss: float | None

    accuracy: list[float]
    wilson_low: list[float]
    wilson_high: list[float]
    bootstrap_low: list[float]
    bootstrap_high: list[float]
    nll: list[float] | None
    gold_probability: list[float] | None
    target_position_mean: list[float] | None
    target_position_variance: list[float] | None

    mean: float
    worst: float
    worst_residue: int
    gap: float
    sigma: float
    normalised_gap: float | None
    period: int | None

    mean_interval: list[float]
    worst_interval: list[float]
    gap_interval: list[float]
    gap_percentile_interval: list[float]  # the paper's; biased, see bands.py
    sigma_interval: list[float]
    verdict: str
    p_value: float

    by_phase: list[float] | None
    phase_worst: float | None
    phase_gap: float | None
    phase_sigma: float | None
    boundary_phase: float | None
    within_window_gap: float | None

    def to_dict(self) -> dict:
        """The report as plain Python values, in the order above."""
        return to_json(asdict(self))


def phase_report(
    correct,
    stride: int | None,
    *,
    replicates: int = 2000,
    seed: int = 0,
    permutations: int = 10_000,
    smallest_gap: float = 0.10,
    nll=None,
    gold_probability=None,
    target_position=None,
    model: str | None = None,
    width: int | None = None,
    kv_heads: int | None = None,
    protocol: str | None = None,
    validation_loss: float | None = None,
) -> PhaseReport:
    """Report on `correct[N, R]` of a model with the given stride (None: full attention).

    `nll`, `gold_probability` and `target_position` are `[N, R]` or None. The boundary phase S - 1 and the
    gap within the window are given only where `width` equals `stride`: with overlap there is no boundary
    phase. Raises ValueError where as_correct does, for a stride that does not divide R, and for other
    shapes than [N, R].
    """
    correct = as_correct(correct)
    rows, residues = correct.shape
    if stride is not None:
        check_stride(stride, residues)
    hits = correct.sum(axis=0)
    accuracy = hits / rows
    draws = {"replicates": replicates, "seed": seed}
    wilson_low, wilson_high = wilson(hits, rows)
    bootstrap_low, bootstrap_high = curve_interval(correct, **draws)
    gap_bounds = gap_interval(correct, **draws)
    p_value = permutation_test(correct, permutations=permutations, seed=seed)
    positions = _matrix("target_position", target_position, correct.shape)
    fields = {
        "model": model,
        "W": width,
        "S": stride,
        "kv_heads": kv_heads,
        "protocol": protocol,
        "residues": residues,
        "n_logical": rows,
        "validation_loss": validation_loss,
        "accuracy": accuracy,
        "wilson_low": wilson_low,
        "wilson_high": wilson_high,
        "bootstrap_low": bootstrap_low,
        "bootstrap_high": bootstrap_high,
        "nll": _column_means(_matrix("nll", nll, correct.shape)),
        "gold_probability": _column_means(_matrix("gold_probability", gold_probability, correct.shape)),
        "target_position_mean": _column_means(positions),
        "target_position_variance": None if positions is None else positions.var(axis=0),
        **summarise(accuracy),
        "period": detect_period(accuracy, rows),
        "mean_interval": mean_interval(correct.mean(axis=1), **draws),
        "worst_interval": worst_interval(correct, **draws),
        "gap_interval": gap_bounds,
        "gap_percentile_interval": gap_percentile_interval(correct, **draws),
        "sigma_interval": sigma_interval(correct, **draws),
        "verdict": verdict(p_value, gap_bounds[1], smallest_gap=smallest_gap),
        "p_value": p_value,
        **_folded(accuracy, stride, width),
    }
    return PhaseReport(**to_json(fields))


def _folded(accuracy, stride: int | None, width: int | None) -> dict:
    names = ("by_phase", "phase_worst", "phase_gap", "phase_sigma", "boundary_phase", "within_window_gap")
    result = dict.fromkeys(names)
    if stride is None:
        return result
    phases = fold(accuracy, stride)
    numbers = summarise(phases)
    result |= {"by_phase": phases, **{f"phase_{name}": numbers[name] for name in ("worst", "gap", "sigma")}}
    if width == stride:
        result["boundary_phase"] = phases[-1]
        if stride > 1:
            result["within_window_gap"] = np.ptp(phases[:-1])
    return result


def _matrix(name: str, values, shape) -> np.ndarray | None:
    if values is None:
        return None
    values = np.asarray(values, np.float64)
    if values.shape != shape:
        raise ValueError(f"{name}: expected the shape of correct, {shape}, got {values.shape}")
    return values


def _column_means(values: np.ndarray | None) -> np.ndarray | None:
    return None if values is None else values.mean(axis=0)
