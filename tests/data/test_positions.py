"""Matched target positions, counted anew by loops over samples and residues."""

import re

import numpy as np
import pytest

from phase_jax.data.positions import in_slot, matched_slot_starts, matching, place_targets
from phase_jax.errors import UserError

COUNTS = [*range(1, 130), 192, 200, 250, 999, 1000, 1200, 2400]


def moments(position, residues):
    """Mean and variance of the target's position in every residue group, each group gathered by its residue."""
    groups = [position[position % residues == r].astype(float) for r in range(residues)]
    means = [group.sum() / len(group) for group in groups]
    return means, [((group - mean) ** 2).sum() / len(group) for group, mean in zip(groups, means, strict=True)]


def deviations(position, residues):
    """Largest distance of a group's mean from the mean of means, and of its variance from theirs, as a fraction."""
    means, variances = moments(position, residues)
    mean, variance = sum(means) / residues, sum(variances) / residues
    from_variance = max(abs(v - variance) for v in variances) / variance if variance else 0.0
    return max(abs(m - mean) for m in means), from_variance


def least_slack(residues, records, record_length):
    """The number that the error names."""
    with pytest.raises(UserError) as raised:
        place_targets(1, residues, records, record_length, 0, 0)
    return int(re.search(r"it needs (\d+) or more", str(raised.value))[1])


@pytest.mark.parametrize("residues", [8, 24])
def test_every_sample_meets_every_residue_once_within_a_slot(residues):
    starts = matched_slot_starts(100, residues)
    assert len(starts) == 100 and starts.min() >= 0 and starts.max() <= 2 * residues - 2
    for start, row in zip(starts, in_slot(starts, residues).tolist(), strict=True):
        assert [p % residues for p in row] == list(range(residues))
        assert sorted(row) == list(range(start, start + residues))


@pytest.mark.parametrize("residues", [2, 3, 8, 12, 24])
def test_positions_match_over_residues_for_every_number_of_samples(residues):
    for n in COUNTS:
        position = in_slot(matched_slot_starts(n, residues), residues)
        mean, variance = deviations(position, residues)
        assert mean <= residues / n, n
        assert variance <= max(0.01, 6 / n), n
        assert (mean < 1e-9) == (n % residues == 0), f"{n}: means are equal exactly where R divides n"
        assert matching(position)["matched"] == (variance <= 0.01), n
        assert variance <= 0.01 or n < 500


def test_a_thousand_samples_match_within_a_percent():
    placement = place_targets(1000, 24, 16, 2, 53, seed=0)
    mean, variance = deviations(placement.position, 24)
    assert mean <= 24 / 1000 and variance <= 0.01


def test_each_residue_uses_at_most_three_lattice_points():
    position = in_slot(matched_slot_starts(1000, 24), 24)
    for r in range(24):
        assert set(position[:, r]) <= {r, r + 24, r + 48}


def test_what_is_stored_of_the_matching_is_what_was_found():
    position = in_slot(matched_slot_starts(1000, 24), 24)
    found = matching(position)
    assert (found["mean_deviation"], found["variance_deviation"]) == pytest.approx(deviations(position, 24))
    assert found["matched"] is True


@pytest.mark.parametrize("spoil", ["mean", "variance"])
def test_unmatched_positions_are_not_called_matched(spoil):
    position = in_slot(matched_slot_starts(240, 24), 24).copy()
    if spoil == "mean":
        position[:, 5] += 24
    else:
        position[::2, 5] += 24
        position[1::2, 5] -= 24
    assert matching(position)["matched"] is False


@pytest.mark.parametrize(
    ("residues", "records", "record_length", "slack"), [(24, 16, 2, 53), (8, 4, 2, 30), (24, 1, 2, 80), (8, 5, 4, 40)]
)
def test_targets_stay_within_reach_and_every_reachable_rank_occurs(residues, records, record_length, slack):
    n = 3000
    placement = place_targets(n, residues, records, record_length, slack, seed=3)
    seen = {}
    for row, rank in zip(placement.position.tolist(), placement.rank.tolist(), strict=True):
        assert sorted(p % residues for p in row) == list(range(residues))
        filler_before = [p - 1 - rank * record_length for p in row]
        assert 0 <= rank < records and min(filler_before) >= 0 and max(filler_before) <= slack
        seen.setdefault(min(row), []).append(rank)
    for start, ranks in seen.items():
        possible = [
            k
            for k in range(records)
            if start - 1 - k * record_length >= 0 and start + residues - 2 - k * record_length <= slack
        ]
        share = len(ranks) / len(possible)
        counts = [ranks.count(k) for k in possible]
        assert sum(counts) == len(ranks)
        # Equally likely: no count is further than five standard deviations (and a little) from its share.
        assert max(abs(c - share) for c in counts) <= 5 * np.sqrt(share) + 2


def test_placement_is_a_function_of_the_seed():
    first, again, other = (place_targets(50, 24, 16, 2, 53, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.position, again.position)
    np.testing.assert_array_equal(first.rank, again.rank)
    assert (first.position != other.position).any() and (first.rank != other.rank).any()


@pytest.mark.parametrize("residues", [8, 24])
@pytest.mark.parametrize("records", [1, 2, 7, 16, 40])
@pytest.mark.parametrize("record_length", [1, 2, 4])
def test_the_slack_named_in_the_error_is_the_least(residues, records, record_length):
    least = least_slack(residues, records, record_length)
    for slack in range(least):
        with pytest.raises(UserError, match=f"too short .* {least} or more"):
            place_targets(200, residues, records, record_length, slack, 0)
    placement = place_targets(200, residues, records, record_length, least, 0)
    filler_before = placement.position - 1 - placement.rank[:, None] * record_length
    assert filler_before.min() >= 0 and filler_before.max() <= least
