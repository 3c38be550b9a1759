"""Changes of paired sweeps: the relative map, and the tests of whether all residues lose alike."""

import numpy as np
import pytest

from phase_jax.statistics import compare, gap_change_interval, loss_dependence, relative_change, relative_dependence
from phase_jax.statistics.change import same_everywhere


def drawn(clean, kept, n, seed):
    """Clean answers [n, R] of accuracies `clean`, and as many of each residue's right ones kept as `kept` says."""
    rng = np.random.default_rng(seed)
    right = rng.random((n, len(clean))) < np.asarray(clean)
    return right & (rng.random(right.shape) < np.asarray(kept)), right


def test_relative_change_is_in_percent_and_undefined_where_nothing_was_right():
    found = relative_change([0.5, 0.0, 0.3, 0.2], [1.0, 0.5, 0.0, 0.1])
    np.testing.assert_allclose(found, [-50, -100, np.nan, 100])


def test_unequal_accuracies_alone_are_no_relative_dependence():
    clean = np.tile([0.9, 0.2, 0.6, 0.05], 2)
    p_values = [relative_dependence(*drawn(clean, 0.5, 150, seed), replicates=400) for seed in range(200)]
    # At the true level 0.05, more than 20 of 200 have probability 0.001.
    assert sum(p < 0.05 for p in p_values) <= 20
    assert np.mean(p_values) == pytest.approx(0.5, abs=0.12)
    assert loss_dependence(*drawn(clean, 0.5, 150, 0), replicates=400) < 0.01, "but the points lost differ"


def test_a_loss_at_one_phase_is_found():
    clean, kept = np.full(8, 0.7), np.tile([1, 1, 0.6, 1], 2)
    for seed in range(5):
        pair = drawn(clean, kept, 150, seed)
        assert relative_dependence(*pair, replicates=400) < 0.01 and loss_dependence(*pair, replicates=400) < 0.01


def test_equal_losses_are_not_found():
    p_values = [loss_dependence(*drawn(np.full(8, 0.7), 0.5, 100, seed), replicates=400) for seed in range(200)]
    assert sum(p < 0.05 for p in p_values) <= 20


def test_nothing_lost_and_nothing_right():
    right = np.ones((30, 4), bool)
    assert loss_dependence(right, right) == relative_dependence(right, right) == 1
    assert relative_dependence(~right, ~right) is None
    assert same_everywhere(np.zeros((5, 3))) == 1


PEAK = np.array([0.75, 0.66, 0.02, 0.02, 0.02, 0.02])


@pytest.mark.parametrize(
    ("first", "second", "agree"),
    [(PEAK, PEAK, 0.98), (PEAK, np.full(6, 0.03), 0.5), (np.full(6, 0.5), np.full(6, 0.5), 0.9)],
    ids=["nearly the same", "collapsed", "flat"],
)
def test_the_interval_of_a_change_of_the_gap_covers_and_profits_from_pairing(first, second, agree):
    rng = np.random.default_rng(1)
    missed = 0
    for seed in range(60):
        u = rng.random((60, 6))
        pair = u < first, np.where(rng.random(u.shape) < agree, u, rng.random(u.shape)) < second
        low, high = gap_change_interval(*pair, replicates=100, seed=seed)
        missed += not low <= np.ptp(first) - np.ptp(second) <= high
    assert missed <= 8  # 60 at 0.95: more than 8 has probability 0.003
    if agree > 0.8:
        wide = compare(*pair, replicates=100).gap_interval
        assert high - low < 0.6 * (wide[1] - wide[0])
    assert gap_change_interval(*pair[::-1], replicates=100, seed=seed) == pytest.approx((-high, -low))
