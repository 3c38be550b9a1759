"""Statistics of phase sweeps: numpy in, numpy out; knows nothing of JAX or of models (SPEC section 6)."""

from phase_jax.statistics.arrays import as_correct, fold, to_json
from phase_jax.statistics.bands import gap_change_interval, gap_interval, worst_interval
from phase_jax.statistics.bootstrap import (
    bootstrap_curves,
    curve_interval,
    gap_percentile_interval,
    mean_interval,
    sigma_interval,
)
from phase_jax.statistics.change import change_report, loss_dependence, relative_change, relative_dependence
from phase_jax.statistics.comparison import Comparison, compare
from phase_jax.statistics.curves import summarise
from phase_jax.statistics.cycling import cycling_report
from phase_jax.statistics.dependence import failure_correlation, row_correlation
from phase_jax.statistics.gates import alignment, best_shift, effective_offsets, gate_profile
from phase_jax.statistics.hypothesis_tests import cochran_q, holm, permutation_test, verdict
from phase_jax.statistics.intervals import clopper_pearson, wilson
from phase_jax.statistics.period import detect_period
from phase_jax.statistics.power import detection_power, samples_needed
from phase_jax.statistics.report import PhaseReport, phase_report
from phase_jax.statistics.simulation import one_phase_off, simulate
from phase_jax.statistics.split_half import SplitHalf, split_half_worst
from phase_jax.statistics.sweep import SweepPeriod, sweep_period

__all__ = [
    "Comparison",
    "PhaseReport",
    "SplitHalf",
    "SweepPeriod",
    "alignment",
    "as_correct",
    "best_shift",
    "bootstrap_curves",
    "change_report",
    "clopper_pearson",
    "cochran_q",
    "compare",
    "curve_interval",
    "cycling_report",
    "detect_period",
    "detection_power",
    "effective_offsets",
    "failure_correlation",
    "fold",
    "gap_change_interval",
    "gap_interval",
    "gap_percentile_interval",
    "gate_profile",
    "holm",
    "loss_dependence",
    "mean_interval",
    "one_phase_off",
    "permutation_test",
    "phase_report",
    "relative_change",
    "relative_dependence",
    "row_correlation",
    "samples_needed",
    "sigma_interval",
    "simulate",
    "split_half_worst",
    "summarise",
    "sweep_period",
    "to_json",
    "verdict",
    "wilson",
    "worst_interval",
]
