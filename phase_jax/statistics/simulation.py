"""Made-up phase sweeps with known truth, to measure how the statistics err."""

import numpy as np
from scipy import stats

from phase_jax.statistics.arrays import check_stride


def simulate(truth, rows: int, correlation: float, rng) -> np.ndarray:
    """Answers `[rows, R]` (bool) whose accuracy at residue r is exactly `truth[r]`.

    Logical samples differ in difficulty: a normal latent score has the share `correlation` (0 to 1) of its
    variance in common over the replicas of a row (a probit-normal model), and a replica is right if its score
    lies below the quantile of its truth.
    """
    truth = np.asarray(truth, np.float64)
    difficulty = rng.standard_normal((rows, 1))
    noise = rng.standard_normal((rows, truth.size))
    return np.sqrt(correlation) * difficulty + np.sqrt(1 - correlation) * noise < stats.norm.ppf(truth)


def one_phase_off(mean: float, gap: float, stride: int, residues: int) -> np.ndarray:
    """The curve `[R]` whose last phase (residue mod S = S - 1) is `gap` away from the others, towards 1/2.

    `mean` is the accuracy of the others. Raises ValueError if the stride does not divide the residues.
    """
    phases = np.full(check_stride(stride, residues), mean)
    phases[-1] += gap if mean < 0.5 else -gap
    return np.tile(phases, residues // stride)
