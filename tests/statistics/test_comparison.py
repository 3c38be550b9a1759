"""Two models, split halves, dependence between phases, and power."""

import json

import numpy as np
import pytest
from statsmodels.stats.power import GofChisquarePower

from phase_jax.statistics import (
    cochran_q,
    compare,
    detection_power,
    failure_correlation,
    one_phase_off,
    row_correlation,
    samples_needed,
    simulate,
    split_half_worst,
    to_json,
)

FLAT, BUMPY = np.full(24, 0.5), np.tile([0.6, 0.6, 0.6, 0.2], 6)


def test_comparison_finds_the_differences():
    rng = np.random.default_rng(0)
    first, second = simulate(BUMPY, 400, 0.4, rng), simulate(FLAT, 400, 0.4, rng)
    result = compare(first, second)
    curves = first.mean(axis=0), second.mean(axis=0)
    assert result.mean == pytest.approx(first.mean() - second.mean())
    assert result.worst == pytest.approx(curves[0].min() - curves[1].min())
    assert result.gap == pytest.approx(np.ptp(curves[0]) - np.ptp(curves[1]))
    assert result.worst_interval[0] < -0.3 < result.worst_interval[1] < 0
    assert 0 < result.gap_interval[0] < 0.4 < result.gap_interval[1]


def test_comparison_of_a_model_with_itself_and_backwards():
    rng = np.random.default_rng(1)
    first, second = simulate(BUMPY, 200, 0.4, rng), simulate(FLAT, 200, 0.4, rng)
    same = compare(first, first)
    assert same.mean == same.worst == same.gap == 0
    assert same.worst_interval[0] < 0 < same.worst_interval[1] and same.gap_interval[0] < 0 < same.gap_interval[1]
    forth, back = compare(first, second), compare(second, first)
    assert forth.gap == -back.gap
    np.testing.assert_allclose(forth.gap_interval, [-end for end in reversed(back.gap_interval)])


def test_pairing_narrows_the_mean():
    """The same hard samples trouble both models: within rows that cancels."""
    rng = np.random.default_rng(2)
    both = simulate(np.full(48, 0.5), 400, 0.8, rng)
    paired = compare(both[:, :24], both[:, 24:]).mean_interval
    unpaired = compare(both[:, :24], both[rng.permutation(400), 24:]).mean_interval
    assert paired[1] - paired[0] < 0.4 * (unpaired[1] - unpaired[0])


def test_comparison_covers():
    rng = np.random.default_rng(3)
    hits = np.zeros(3)
    for seed in range(150):
        pair = simulate(np.concatenate([BUMPY, FLAT]), 100, 0.4, rng)
        result = compare(pair[:, :24], pair[:, 24:], replicates=200, seed=seed)
        intervals = (result.mean_interval, 0.0), (result.worst_interval, -0.3), (result.gap_interval, 0.4)
        hits += [low <= truth <= high for (low, high), truth in intervals]
    assert hits[0] / 150 >= 0.9 and hits[1] / 150 >= 0.93 and hits[2] / 150 >= 0.93


def test_comparison_needs_the_same_samples():
    with pytest.raises(ValueError, match="same samples"):
        compare(np.zeros((3, 4)), np.zeros((3, 8)))


def test_split_half_is_not_fooled():
    """On flat truths the smallest accuracy is far below one half; the split estimate is not, and it covers."""
    rng = np.random.default_rng(4)
    naive, split, covered = [], [], []
    for seed in range(200):
        correct = simulate(FLAT, 100, 0.3, rng)
        result = split_half_worst(correct, seed=seed, replicates=300)
        naive.append(correct.mean(axis=0).min())
        split.append(result.accuracy)
        covered.append(result.interval[0] <= 0.5 <= result.interval[1])
    assert np.mean(naive) < 0.42 and np.mean(split) == pytest.approx(0.5, abs=0.01)
    assert np.mean(covered) >= 0.9


def test_split_half_names_the_phase():
    correct = simulate(BUMPY, 200, 0.3, np.random.default_rng(5))
    result = split_half_worst(correct, 4)
    assert result.phases == (3, 3) and result.interval[0] < 0.2 < result.interval[1]
    with pytest.raises(ValueError, match="2 logical samples"):
        split_half_worst(correct[:1])


def test_failure_correlation():
    correct = simulate(BUMPY, 500, 0.6, np.random.default_rng(6))
    matrix = failure_correlation(correct)
    expected = [[np.corrcoef(correct[:, r], correct[:, s])[0, 1] for s in range(24)] for r in range(24)]
    np.testing.assert_allclose(matrix, expected, atol=1e-12)
    folded = failure_correlation(correct, 4)
    assert folded.shape == (4, 4) and folded[0, 1] > matrix[0, 1] > 0.2  # averages of six carry less noise


def test_failure_correlation_without_failures_is_null():
    correct = np.array([[1, 0, 1], [1, 1, 0]])
    matrix = to_json(failure_correlation(correct))
    assert matrix[0] == [None, None, None] and matrix[1][2] == pytest.approx(-1)
    json.dumps(to_json(failure_correlation(correct[:1])), allow_nan=False)


def test_row_correlation_is_the_mean_pair_correlation():
    correct = simulate(FLAT, 4000, 0.5, np.random.default_rng(7))
    pairs = failure_correlation(correct)[np.triu_indices(24, k=1)]
    assert row_correlation(correct) == pytest.approx(pairs.mean(), abs=0.005)
    assert row_correlation(np.ones((3, 4))) == 0


@pytest.mark.parametrize(("mean", "correlation"), [(0.5, 0.0), (0.5, 0.5), (0.9, 0.3)])
def test_power_is_what_simulation_shows(mean, correlation):
    """At the n for 80 % power, Cochran's Q sees the gap in about 80 % of simulated sweeps."""
    curve = one_phase_off(mean, 0.1, 8, 24)
    rng = np.random.default_rng(8)
    pair = row_correlation(simulate(curve, 20_000, correlation, rng))
    rows = samples_needed(curve, correlation=max(pair, 0.0))
    seen = np.mean([cochran_q(simulate(curve, rows, correlation, rng))[1] < 0.05 for _ in range(400)])
    assert seen == pytest.approx(0.8, abs=0.06)
    assert detection_power(curve, rows, correlation=max(pair, 0.0)) == pytest.approx(0.8, abs=0.01)


def test_power_by_hand():
    """A two-residue curve 0.4, 0.6: squares 0.02, variance within rows 0.24 + 0.02."""
    effect = np.sqrt(0.02 / 0.26)
    expected = GofChisquarePower().solve_power(effect_size=effect, alpha=0.05, power=0.9, n_bins=2)
    assert samples_needed([0.4, 0.6], power=0.9) == np.ceil(expected)


def test_power_edges():
    assert samples_needed(one_phase_off(0.5, 0.05, 8, 24)) > 3 * samples_needed(one_phase_off(0.5, 0.1, 8, 24))
    assert detection_power(FLAT, 100) == pytest.approx(0.05)
    with pytest.raises(ValueError, match="flat"):
        samples_needed(FLAT)
    with pytest.raises(ValueError, match="fractions"):
        samples_needed([50.0, 60.0])


def test_simulated_accuracy_and_correlation():
    truth = np.array([0.05, 0.5, 0.95, 0.0, 1.0])
    correct = simulate(truth, 40_000, 0.3, np.random.default_rng(9))
    np.testing.assert_allclose(correct.mean(axis=0), truth, atol=0.01)
    assert row_correlation(simulate(FLAT, 10_000, 0.0, np.random.default_rng(0))) == pytest.approx(0, abs=0.005)
    # Two latent normals of correlation 0.3 agree in sign with chance 1/2 + arcsin(0.3) / pi.
    expected = 2 * np.arcsin(0.3) / np.pi
    assert row_correlation(simulate(FLAT, 20_000, 0.3, np.random.default_rng(1))) == pytest.approx(expected, abs=0.01)


def test_one_phase_off():
    np.testing.assert_allclose(one_phase_off(0.5, 0.1, 3, 6), [0.5, 0.5, 0.4] * 2)
    np.testing.assert_allclose(one_phase_off(0.05, 0.1, 2, 4), [0.05, 0.15] * 2)
