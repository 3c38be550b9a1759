"""Statistics of phase sweeps: numpy in, numpy out; knows nothing of JAX or of models (SPEC section 6)."""

from phase_jax.statistics.arrays import as_correct, fold, to_json
from phase_jax.statistics.bands import gap_interval, worst_interval
from phase_jax.statistics.bootstrap import (
    bootstrap_curves,
    curve_interval,
    gap_percentile_interval,
    mean_interval,
    sigma_interval,
)
from phase_jax.statistics.curves import summarise
from phase_jax.statistics.hypothesis_tests import cochran_q, holm, permutation_test, verdict
from phase_jax.statistics.intervals import clopper_pearson, wilson
from phase_jax.statistics.period import detect_period
from phase_jax.statistics.report import PhaseReport, phase_report

__all__ = [
    "PhaseReport",
    "as_correct",
    "bootstrap_curves",
    "clopper_pearson",
    "cochran_q",
    "curve_interval",
    "detect_period",
    "fold",
    "gap_interval",
    "gap_percentile_interval",
    "holm",
    "mean_interval",
    "permutation_test",
    "phase_report",
    "sigma_interval",
    "summarise",
    "to_json",
    "verdict",
    "wilson",
    "worst_interval",
]
