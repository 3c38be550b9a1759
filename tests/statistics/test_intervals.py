import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from phase_jax.statistics import clopper_pearson, wilson


@st.composite
def counts(draw):
    n = draw(st.integers(1, 5000))
    return draw(st.integers(0, n)), n


@given(counts(), st.sampled_from([0.8, 0.95, 0.99]))
def test_agrees_with_scipy(count, confidence):
    k, n = count
    for ours, method in ((wilson, "wilson"), (clopper_pearson, "exact")):
        theirs = stats.binomtest(k, n).proportion_ci(confidence, method=method)
        np.testing.assert_allclose(ours(k, n, confidence), [theirs.low, theirs.high], atol=1e-9)


@given(counts())
def test_holds_the_estimate_and_mirrors(count):
    k, n = count
    low, high = wilson(k, n)
    assert 0 <= low <= k / n <= high <= 1 and low < high
    mirrored = wilson(n - k, n)
    np.testing.assert_allclose([1 - high, 1 - low], mirrored, atol=1e-12)


def test_edges_are_exact():
    low, high = wilson([0, 5], 5)
    assert low[0] == 0 and high[1] == 1 and np.all(low < high)


def test_broadcasts():
    low, high = wilson(np.arange(6).reshape(2, 3), 10)
    assert low.shape == high.shape == (2, 3)


@pytest.mark.parametrize(("k", "n"), [(1, 0), (-1, 5), (6, 5), (np.nan, 5)])
def test_impossible_counts(k, n):
    with pytest.raises(ValueError, match="proportion"):
        wilson(k, n)
