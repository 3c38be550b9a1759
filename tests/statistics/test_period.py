import numpy as np
import pytest
from scipy import stats

from phase_jax.statistics import detect_period, sweep_period


def slow_period(accuracy, n):
    """The rule of the specification, spelled out in loops."""
    residues = len(accuracy)
    mean = sum(accuracy) / residues
    noise = mean * (1 - mean) / n
    if noise == 0 or stats.chi2.sf(sum((a - mean) ** 2 for a in accuracy) / noise, residues - 1) >= 0.005:
        return None
    best = None
    for period in range(1, residues + 1):
        if residues % period:
            continue
        cost = 1.5 * period * np.log(residues)
        for phase in range(period):
            cell = [accuracy[r] for r in range(residues) if r % period == phase]
            cost += sum((a - sum(cell) / len(cell)) ** 2 for a in cell) / noise
        if best is None or cost < best[0]:
            best = cost, period
    return best[1] if best[1] > 1 else None


def test_agrees_with_the_rule_in_loops():
    rng = np.random.default_rng(0)
    found = []
    for _ in range(300):
        residues = int(rng.choice([6, 8, 12, 24]))
        period = int(rng.choice([p for p in range(1, residues + 1) if residues % p == 0]))
        truth = np.tile(0.5 + rng.choice([0.02, 0.1]) * rng.standard_normal(period), residues // period)
        accuracy = rng.binomial(500, np.clip(truth, 0, 1), size=residues) / 500
        found.append(detect_period(accuracy, 500))
        assert found[-1] == slow_period(list(accuracy), 500)
    assert None in found and len(set(found)) > 5


@pytest.mark.parametrize("value", [0.0, 1.0, 0.5])
def test_constant_is_flat(value):
    assert detect_period(np.full(24, value), 1000) is None


def test_one_odd_residue_is_no_period():
    assert detect_period([0.5] * 23 + [0.4], 1000) is None


@pytest.mark.parametrize("accuracy", [[0.5, np.nan], [0.5, 1.5], [0.5], [[0.5, 0.5]]])
def test_bad_curves(accuracy):
    with pytest.raises(ValueError, match="accuracy"):
        detect_period(accuracy, 100)


def test_n_must_be_positive():
    with pytest.raises(ValueError, match="n must"):
        detect_period([0.5, 0.4], 0)


# The completion flip: 16 filler lengths L = 24 ... 39, the two groups' published mean probabilities.
FLIP = np.where(np.arange(24, 40) % 4 >= 2, 0.915 - 0.072, 0.264 - 0.713)


def test_completion_flip_has_period_four():
    noisy = FLIP + 0.1 * np.random.default_rng(0).standard_normal(16)
    for values in (FLIP, noisy, np.log(0.5 + noisy / 4) - np.log(0.5 - noisy / 4)):
        found = sweep_period(values)
        assert found.period == 4 and 1 in found.harmonics and found.p_value < 0.05


def test_a_trend_does_not_hide_it():
    assert sweep_period(FLIP + np.linspace(-3, 3, 16)).period == 4


@pytest.mark.parametrize("period", [2, 3, 4, 5, 6, 8, 12])
def test_periods_that_need_not_divide_the_length(period):
    rng = np.random.default_rng(period)
    hits = 0
    for seed in range(20):
        pattern = stats.zscore(rng.standard_normal(period))
        values = np.tile(pattern, 101 // period + 1)[:101] + 0.5 * rng.standard_normal(101)
        found = sweep_period(values, permutations=300, seed=seed)
        hits += found is not None and found.period == period
    assert hits >= 18


def test_harmonics_are_named():
    t = np.arange(64)
    values = np.cos(2 * np.pi * t / 8) + np.cos(2 * np.pi * 3 * t / 8)
    found = sweep_period(values + 0.1 * np.random.default_rng(0).standard_normal(64))
    assert found.period == 8 and found.harmonics == (1, 3)


@pytest.mark.parametrize("length", [16, 33, 100])
def test_noise_trends_and_curves_have_none(length):
    rng = np.random.default_rng(length)
    alarms = 0
    for seed in range(100):
        noise = rng.standard_normal(length)
        alarms += sweep_period(noise, permutations=200, seed=seed) is not None
        alarms += sweep_period(0.3 * noise + np.linspace(-2, 2, length) ** 2, permutations=200, seed=seed) is not None
    assert alarms <= 14  # 5 % of 200 and two standard errors
    assert sweep_period(np.linspace(0, 1, length)) is None
    assert sweep_period(np.full(length, 0.3)) is None


def test_bad_sweeps():
    with pytest.raises(ValueError, match="at least 16"):
        sweep_period(np.zeros(15))
    with pytest.raises(ValueError, match="finite"):
        sweep_period([np.inf] + [0.0] * 20)
