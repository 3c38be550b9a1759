"""Geometry against a slow loop that follows the words of the definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phase_jax.geometry import ExactBranch, Windows, cached_numbers, common_residues


@st.composite
def windows(draw):
    width = draw(st.integers(1, 14))
    return Windows(width, draw(st.integers(1, width)), draw(st.integers(-(width - 1), 0)))


def slow_windows(w: Windows, length: int) -> list[list[int]]:
    """Every window that has closed, as its list of positions."""
    found, start = [], w.origin
    while start + w.width - 1 <= length - 1:
        found.append(list(range(start, start + w.width)))
        start += w.stride
    return found


@given(windows(), st.integers(0, 60))
def test_counts_starts_and_closes_follow_the_definition(w, length):
    expected = slow_windows(w, length)
    assert w.count(length) == len(expected)
    assert w.starts(length).tolist() == [p[0] for p in expected]
    assert w.closes(length).tolist() == [p[-1] for p in expected]
    assert w.rope_positions(length).tolist() == [p[w.width - w.stride] for p in expected]


@given(windows(), st.integers(1, 60))
def test_visibility_never_looks_ahead(w, length):
    t = np.arange(length)
    expected = [[positions[-1] <= q for positions in slow_windows(w, length)] for q in t]
    np.testing.assert_array_equal(w.visible(t, length), np.array(expected, bool).reshape(length, -1))
    np.testing.assert_array_equal(w.closed(t), np.array(expected, int).reshape(length, -1).sum(1))


@given(windows(), st.integers(1, 60), st.sampled_from(["window", "tail", "none"]), st.integers(0, 8))
def test_every_query_sees_something_and_misses_nothing(w, length, rule, extra):
    exact = ExactBranch(w, rule, max(w.stride - 1, w.width + w.origin - 1, 1) + extra)
    for t in range(length):
        closed = [p for p in slow_windows(w, length) if p[-1] <= t]
        covered = {p for positions in closed for p in positions}
        tail = [p for p in range(t + 1) if p > max((q[-1] for q in closed), default=-1)]
        if rule == "window":
            expected = list(range(max(0, t - exact.width + 1), t + 1))
        elif rule == "tail":
            expected = tail
        else:
            expected = tail if not closed else []
        seen = list(range(int(exact.first(np.int64(t))), t + 1))
        assert seen == expected
        assert seen or closed, "a row that sees nothing must not exist"
        assert len(seen) <= exact.reach
        if rule != "none":
            assert covered | set(seen) >= set(range(t + 1)), "a past token is visible nowhere"


@given(windows(), st.integers(0, 60))
def test_tail_reach_is_attained(w, length):
    exact = ExactBranch(w, "tail")
    longest = max(t - int(exact.first(np.int64(t))) + 1 for t in range(200))
    assert longest == exact.reach or exact.reach == 1
    assert cached_numbers(w, exact, length) == (len(slow_windows(w, length)), min(length, exact.reach))


def test_phases_and_residues():
    w = Windows(8, 4, origin=-4)
    assert w.phase(np.arange(6)).tolist() == [0, 1, 2, 3, 0, 1]
    assert Windows(8, 6, -4).local_phase(np.arange(4)).tolist() == [4, 5, 0, 1]
    assert common_residues([2, 3, 4, 6, 8, 12]) == 24
    assert Windows(8, 6).streams == 2 and Windows(8, 8).streams == 1 and Windows(5, 3).streams == 2


@pytest.mark.parametrize("bad", [(4, 5, 0), (4, 0, 0), (8, 8, 1), (8, 4, -8)])
def test_impossible_windows_are_refused(bad):
    with pytest.raises(ValueError, match="must be between"):
        Windows(*bad)


def test_a_window_that_hides_tokens_is_refused():
    with pytest.raises(ValueError, match="at least 7"):
        ExactBranch(Windows(8, 8), "window", 6)
    with pytest.raises(ValueError, match="choose window, tail or none"):
        ExactBranch(Windows(8, 8), "last")


def test_full_attention_sees_every_past_token():
    exact = ExactBranch(None)
    assert exact.reach is None and exact.first(np.arange(5)).tolist() == [0] * 5
    assert cached_numbers(None, exact, 7) == (0, 7)
