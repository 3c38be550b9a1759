import time

import numpy as np
import pytest
from scipy import stats

from phase_jax.statistics import (
    bootstrap_curves,
    curve_interval,
    gap_interval,
    gap_percentile_interval,
    mean_interval,
    permutation_test,
    phase_report,
    sigma_interval,
    simulate,
    worst_interval,
)
from phase_jax.statistics.bootstrap import row_counts


@pytest.fixture(scope="module")
def correct():
    return simulate(np.tile([0.7, 0.6, 0.4, 0.1], 6), 300, 0.4, np.random.default_rng(0))


def slow_resample(values, rng):
    """One resample of rows, the obvious way."""
    return np.array([values[rng.integers(len(values))] for _ in range(len(values))])


def test_curves_spread_like_slow_resamples(correct):
    rng = np.random.default_rng(1)
    slow = np.array([slow_resample(correct, rng).mean(axis=0) for _ in range(600)])
    fast = bootstrap_curves(correct, replicates=4000, seed=2)
    np.testing.assert_allclose(fast.mean(axis=0), slow.mean(axis=0), atol=0.005)
    # Replicas of a row stay together: the whole covariance agrees, not just the variances.
    np.testing.assert_allclose(np.cov(fast.T), np.cov(slow.T), atol=2e-4)


def test_row_counts_are_resamples():
    rng = np.random.default_rng(0)
    counts = np.concatenate(list(row_counts(50, 400, rng)))
    assert counts.shape == (400, 50) and np.all(counts.sum(axis=1) == 50)
    smooth = np.concatenate(list(row_counts(50, 4000, rng, smooth=True)))
    assert smooth.shape == (4000, 52) and np.all(smooth.sum(axis=1) == 51)
    np.testing.assert_allclose(smooth.mean(axis=0), [1.0] * 50 + [0.5, 0.5], atol=0.07)


def test_blocks_do_not_change_the_result(monkeypatch, correct):
    from phase_jax.statistics import bootstrap

    whole = bootstrap_curves(correct, replicates=200, seed=3)
    monkeypatch.setattr(bootstrap, "_BLOCK", 7 * len(correct))
    np.testing.assert_array_equal(bootstrap_curves(correct, replicates=200, seed=3), whole)


def test_percentiles_agree_with_scipy(correct):
    """scipy's percentile bootstrap of the same rows; the two half rows shift a bound by less than 1 / n."""
    low, high = curve_interval(correct, replicates=4000)
    for residue in (0, 3):
        theirs = stats.bootstrap(
            (correct[:, residue].astype(float),), np.mean, method="percentile", n_resamples=4000, rng=1
        ).confidence_interval
        assert abs(low[residue] - theirs.low) < 0.008 and abs(high[residue] - theirs.high) < 0.008


def test_mean_agrees_with_scipy(correct):
    """Away from the edges, studentised and BCa intervals of the row means are the same to a few thousandths."""
    scores = correct.mean(axis=1)
    theirs = stats.bootstrap((scores,), np.mean, method="BCa", n_resamples=4000, rng=1).confidence_interval
    np.testing.assert_allclose(mean_interval(scores, replicates=4000), theirs, atol=0.003)


def test_mean_of_differences_uses_their_bounds(correct):
    scores = correct.mean(axis=1)
    low, high = mean_interval(scores)
    mirrored = mean_interval(-scores, bounds=(-1.0, 0.0))
    np.testing.assert_allclose(mirrored, (-high, -low), atol=0.002)


def test_mean_of_rare_failures_stays_narrow():
    """One miss in 2,400 answers: most of what a resample says about its own spread is nothing."""
    scores = np.ones(100)
    scores[3] = 23 / 24
    low, high = mean_interval(scores)
    assert 0.95 < low < scores.mean() < high <= 1
    assert mean_interval([1.0])[0] == pytest.approx(0.025)  # Clopper-Pearson for 1 of 1
    assert mean_interval(np.zeros(10), bounds=(-1.0, 1.0))[0] < -0.3


def test_gap_percentiles_are_those_of_the_resampled_gaps(correct):
    gaps = np.ptp(bootstrap_curves(correct, seed=5), axis=1)
    np.testing.assert_allclose(gap_percentile_interval(correct, seed=5), np.quantile(gaps, [0.025, 0.975]))


def test_seeded(correct):
    for function in (worst_interval, gap_interval, sigma_interval):
        assert function(correct, seed=7) == function(correct, seed=7)


def test_confidence_widens(correct):
    for function in (worst_interval, gap_interval, sigma_interval):
        low, high = function(correct, confidence=0.8)
        lower, higher = function(correct, confidence=0.99)
        assert lower <= low <= high <= higher and lower < low and high < higher


def test_relabelling_residues_changes_nothing_but_noise(correct):
    order = np.random.default_rng(3).permutation(24)
    for function in (worst_interval, gap_interval, sigma_interval):
        np.testing.assert_allclose(function(correct[:, order]), function(correct), atol=0.01)


def test_worst_low_is_the_smallest_exact_bound(correct):
    hits = correct.sum(axis=0)
    bounds = [stats.binomtest(int(k), 300).proportion_ci(0.95, method="exact").low for k in hits]
    assert worst_interval(correct)[0] == pytest.approx(min(bounds))


def test_one_wrong_residue_has_a_fair_gap():
    """One cell at 0.98, the others never wrong: where it shows no failure, the gap may still be 0.03."""
    assert gap_interval(np.ones((100, 24)))[1] > 0.03


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_few_rows_claim_little(rows):
    """Coin flips have gap 0 and worst 0.5; a handful of rows must not say otherwise (beyond 5 %)."""
    rng = np.random.default_rng(rows)
    sweeps = [rng.random((rows, 24)) < 0.5 for _ in range(100)]
    gaps = [gap_interval(sweep, replicates=200) for sweep in sweeps]
    worsts = [worst_interval(sweep, replicates=200) for sweep in sweeps]
    assert np.mean([low == 0 for low, _ in gaps]) >= 0.93
    assert np.mean([low <= 0.5 <= high for low, high in worsts]) >= 0.93


def test_fast_enough():
    """Issue: 2,000 replicates of 1,000 x 24 in under 2 s and 10,000 permutations in under 5 s, on one core."""
    sweep = simulate(np.full(24, 0.5), 1000, 0.3, np.random.default_rng(0))
    bootstrap_curves(sweep, replicates=10)  # the first call of BLAS is slower
    for function, limit in ((bootstrap_curves, 2), (curve_interval, 2), (gap_interval, 2), (permutation_test, 5)):
        start = time.process_time()
        function(sweep)
        assert time.process_time() - start < limit, function.__name__
    start = time.process_time()
    phase_report(sweep, 8)
    assert time.process_time() - start < 8
