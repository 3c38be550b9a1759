import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from statsmodels.stats.multitest import multipletests

from phase_jax.statistics import cochran_q, holm, permutation_test, simulate, verdict
from phase_jax.statistics.hypothesis_tests import _shuffled_column_sums


def slow_column_sums(correct, permutations, rng):
    """Shuffle every row, add up the columns: the obvious way."""
    return np.array([[rng.permutation(row) for row in correct] for _ in range(permutations)]).sum(axis=1)


def test_column_sums_have_the_distribution_of_shuffled_rows():
    rng = np.random.default_rng(0)
    correct = simulate(np.array([0.9, 0.2, 0.5, 0.5, 0.1]), 12, 0.5, rng)
    slow = slow_column_sums(correct, 4000, rng)
    fast = _shuffled_column_sums(correct.sum(axis=1), 5, 40_000, seed=1)
    np.testing.assert_array_equal(fast.sum(axis=1), correct.sum())
    np.testing.assert_allclose(fast.mean(axis=0), correct.sum() / 5, atol=0.04)
    # A shuffled row has variance p (1 - p) in every column, shared out with a minus sign over the other columns.
    share = correct.mean(axis=1)
    variance = (share * (1 - share)).sum()
    expected = variance * (np.eye(5) - (1 - np.eye(5)) / 4)
    np.testing.assert_allclose(np.cov(fast.T), expected, atol=0.06)
    for level in (0.5, 0.9, 0.99):
        spreads = np.quantile(fast.var(axis=1), level), np.quantile(slow.var(axis=1), level)
        assert spreads[0] == pytest.approx(spreads[1], rel=0.12)


def test_exact_p_value_by_enumeration():
    """Two rows of three with one answer right: both in one column has chance 1/3, and that is the largest spread."""
    assert permutation_test([[1, 0, 0], [1, 0, 0]], permutations=30_000) == pytest.approx(1 / 3, abs=0.015)
    assert permutation_test([[1, 0, 0], [0, 1, 0]]) == 1.0


@settings(max_examples=25, deadline=None)
@given(arrays(bool, st.tuples(st.integers(1, 12), st.integers(2, 9))))
def test_p_value_is_one_and_always_a_number(correct):
    p = permutation_test(correct, permutations=99)
    assert 0.01 <= p <= 1
    statistic, p = cochran_q(correct)
    assert np.isfinite(statistic) and 0 <= p <= 1


def test_agrees_with_cochran_for_many_rows():
    rng = np.random.default_rng(5)
    for shift in (0.0, 0.03, 0.06):
        correct = simulate(0.5 + shift * (np.arange(24) % 4 == 3), 400, 0.3, rng)
        assert permutation_test(correct) == pytest.approx(cochran_q(correct)[1], abs=0.02)


def test_no_mixed_rows_is_no_evidence():
    assert permutation_test(np.ones((5, 8))) == 1.0
    assert cochran_q(np.vstack([np.ones((5, 8)), np.zeros((3, 8))])) == (0.0, 1.0)


def test_holm():
    p = [0.01, 0.04, 0.03, 0.005]
    np.testing.assert_allclose(holm(p), multipletests(p, method="holm")[1])
    np.testing.assert_allclose(holm(p), [0.03, 0.06, 0.06, 0.02])  # by hand
    assert holm([]).size == 0


def test_verdict():
    assert verdict(0.049, 0.01) == "sensitive"
    assert verdict(0.05, 0.0999) == "not seen"
    assert verdict(0.05, 0.10) == "undecided"
    assert verdict(0.2, 0.15, smallest_gap=0.2) == "not seen"
