"""Where the target goes: one position of every residue for each logical sample, matched over samples (SPEC §4).

A logical sample owns a slot of R consecutive positions, so its R replicas put the target once on every residue and
never further than R − 1 tokens apart. Over samples, the slots' starts are spread so that the target's position has the
same mean and variance in every residue group: residue r is used at three lattice points r, r + R, r + 2R, and the
counts at these three are solved for.
"""

import dataclasses

import numpy as np

from phase_jax.errors import UserError


def matched_slot_starts(n: int, residues: int) -> np.ndarray:
    """Starts of n slots, sorted, in 0 … 2R−2: the positions `in_slot(starts, r)` match in mean and variance over r.

    With N_r slots that start at a residue ≤ r, of which K_r start one lattice step later, residue r is used
    A0 = N_r − K_r times at r and A2 = K_last − K_r times at r + 2R. The mean is the same for all r iff
    N_r = n (r+1)/R, and the variance iff (A0 + A2)/n − ((A0 − A2)/n)² is; both are solved, then rounded, so the mean is
    within R/n tokens (exact where R divides n) and the variance within 6/n of itself.
    """
    r = np.arange(residues)
    started = np.rint(n * (r + 1) / residues)
    late_share = (residues - 1) / (2 * residues)
    late_total = np.rint(n * late_share)
    spread = late_share * (1 - late_share)
    late = np.rint((started + late_total - n * (spread + ((started - late_total) / n) ** 2)) / 2)
    late = np.clip(np.maximum.accumulate(late), 0, started)
    late[-1] = late_total
    n_class = np.diff(started, prepend=0)
    n_late = np.clip(np.diff(late, prepend=0), 0, n_class).astype(int)
    n_early = (n_class - n_late).astype(int)
    return np.sort(np.concatenate([np.repeat(r, n_early), np.repeat(r + residues, n_late)]))


def in_slot(starts: np.ndarray, residues: int) -> np.ndarray:
    """Target positions [n, R]: the one position ≡ r (mod R) among `start … start + R − 1`."""
    return starts[:, None] + (np.arange(residues) - starts[:, None]) % residues


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where each logical sample's target goes: its position in every replica [n, R] and its rank among records [n]."""

    position: np.ndarray
    rank: np.ndarray


def place_targets(n: int, residues: int, records: int, record_length: int, slack: int, seed: int) -> Placement:
    """Matched target positions, and a rank for each that leaves room to move.

    `slack` is how many filler tokens stand before and after the records together; BOS is at position 0, so a target
    of rank k that has f filler tokens before it is at 1 + f + k · record_length. Every rank that keeps 0 ≤ f ≤ slack in
    all R replicas is equally likely. Raises UserError where the slack is too small for that.
    """
    room = slack - (residues - 1)
    span = (records - 1) * record_length
    # Centre the slots' starts on the middle rank at half of the room.
    first = 1 + (span + room) // 2 - (residues - 1)
    rng = np.random.default_rng([seed, 0])
    starts = first + rng.permutation(matched_slot_starts(n, residues))
    lowest, highest = _reachable_ranks(starts, room, records, record_length)
    # Wherever a slot may start, drawn or not, so that what is refused depends on the sizes alone.
    least, most = _reachable_ranks(first + np.arange(2 * residues - 1), room, records, record_length)
    if room < 0 or first < 1 or (least > most).any():
        raise UserError(
            f"a prompt with {slack} filler tokens is too short to put the target of {records} records on {residues}"
            f" residues at matched positions: it needs {least_slack(residues, records, record_length)} or more"
        )
    rank = lowest + rng.integers(0, highest - lowest + 1)
    return Placement(in_slot(starts, residues), rank)


def _reachable_ranks(starts: np.ndarray, room: int, records: int, record_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest rank that a target whose slot starts there may have; the lowest is higher where none may."""
    lowest = np.maximum(0, -(-(starts - 1 - room) // record_length))
    return lowest, np.minimum(records - 1, (starts - 1) // record_length)


def least_slack(residues: int, records: int, record_length: int) -> int:
    """The least slack at which the slots' starts, 2R − 1 of them, are all within reach of some rank."""
    span = (records - 1) * record_length
    room = max(record_length - 1, 2 * (residues - 1) - span)
    while (span + room) // 2 < residues - 1:
        room += 1
    return room + residues - 1


def matching(position: np.ndarray) -> dict:
    """How well target positions [n, R] match over residues, and whether that is what SPEC §4 asks for.

    Largest deviation of a residue's mean from the mean over residues (tokens), and of its variance (a fraction).
    `matched`: they are at most R/n tokens and 1 %, which takes up to 500 samples.
    """
    n, residues = position.shape
    mean, variance = position.mean(axis=0), position.var(axis=0)
    mean_deviation = float(np.abs(mean - mean.mean()).max())
    variance_deviation = float(np.abs(variance / variance.mean() - 1).max()) if variance.mean() else 0.0
    matched = mean_deviation <= residues / n and variance_deviation <= 0.01
    return {
        "mean_deviation": mean_deviation,
        "variance_deviation": variance_deviation,
        "matched": bool(matched),
    }
