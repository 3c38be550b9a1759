"""Phase-evaluation prompts of the recall task: every logical sample on every residue (SPEC §4).

A prompt is BOS, filler, records with filler between them (`insequence`, `target`) or not (`prefix`), filler, the query
mark, demonstrations, and the target's animal as the last token; a record is an animal and then its name. All prompts
of a run have one length and one query position.
"""

import dataclasses
from typing import Literal

import numpy as np
import scipy.stats

from phase_jax.data.positions import matching, place_targets
from phase_jax.data.vocabulary import Vocabulary
from phase_jax.errors import UserError

Protocol = Literal["prefix", "insequence", "target"]
PROTOCOLS: tuple[Protocol, ...] = ("prefix", "insequence", "target")
RECORD_LENGTH = 2
RESIDUES = 24


@dataclasses.dataclass(frozen=True)
class PhasePrompts:
    """Prompts of n logical samples: tokens [n, R, T], the right answer [n], positions of every record's key [n, R, m],
    the target's position [n, R] and rank [n], and what was checked of them."""

    tokens: np.ndarray
    answer: np.ndarray
    record_position: np.ndarray
    target_position: np.ndarray
    rank: np.ndarray
    checks: dict


def closing_length(demonstrations: int) -> int:
    """Tokens from the query mark to the end: the mark, the demonstrations, and the target's animal."""
    return 1 + RECORD_LENGTH * demonstrations + 1


def phase_prompts(
    vocabulary: Vocabulary,
    protocol: Protocol,
    n: int,
    *,
    length: int,
    records: int,
    demonstrations: int,
    seed: int,
    residues: int = RESIDUES,
) -> PhasePrompts:
    """Builds n logical samples on `residues` residues each; a function of its arguments alone.

    Raises UserError for an impossible size: no sample, fewer words than records, demonstrations that do not leave the
    target out, or a length in which the target cannot be matched over residues.
    """
    if n < 1:
        raise UserError(f"--logical {n}: at least one logical sample is needed")
    if protocol not in PROTOCOLS:
        raise UserError(f"unknown protocol '{protocol}'; choose {', '.join(PROTOCOLS)}")
    if records > vocabulary.words:
        raise UserError(f"{records} records need as many single-token words of a kind; there are {vocabulary.words}")
    if not 0 <= demonstrations < records:
        raise UserError(f"{demonstrations} demonstrations: choose from 0 to {records - 1}, all records but the target")
    slack = length - 1 - RECORD_LENGTH * records - closing_length(demonstrations)
    try:
        placement = place_targets(n, residues, records, RECORD_LENGTH, slack, seed)
    except UserError as error:
        raise UserError(f"prompt length {length}: {error}") from None
    rng = np.random.default_rng([seed, 1])
    rank, target = placement.rank, placement.position
    position = _PLACE[protocol](target, rank, records, slack, rng)

    animals = _permutations(rng, n, vocabulary.words)[:, :records]
    names = _permutations(rng, n, vocabulary.words)[:, :records]
    pairs = np.stack([vocabulary.first_animal + animals, vocabulary.first_name + names], axis=-1)
    others = _permutations(rng, n, records - 1)[:, :demonstrations]
    shown = np.take_along_axis(pairs, (others + (others >= rank[:, None]))[..., None], axis=1)
    asked = pairs[np.arange(n), rank]

    tokens = np.full((n, residues, length), vocabulary.filler, np.int32)
    tokens[:, :, 0] = vocabulary.bos
    for part in range(RECORD_LENGTH):
        np.put_along_axis(tokens, position + part, pairs[:, None, :, part].astype(np.int32), axis=2)
    closing = length - closing_length(demonstrations)
    tokens[:, :, closing] = vocabulary.query_mark
    tokens[:, :, closing + 1 : -1] = shown.reshape(n, 1, -1)
    tokens[:, :, -1] = asked[:, None, 0]

    checks = {**matching(target), "distractors": distractor_dependence(position, rank)}
    _assert_positions(tokens, asked, target, closing)
    return PhasePrompts(tokens, asked[:, 1], position, target, rank, checks)


def _assert_positions(tokens: np.ndarray, asked: np.ndarray, target: np.ndarray, closing: int) -> None:
    """Reads the target's position back from the ids: its animal occurs once before the query, its name follows."""
    found = tokens[:, :, :closing] == asked[:, None, :1]
    assert (found.sum(axis=2) == 1).all() and (found.argmax(axis=2) == target).all()
    follows = np.take_along_axis(tokens, target[..., None] + 1, axis=2)[..., 0]
    assert (follows == asked[:, 1:]).all()


def _permutations(rng: np.random.Generator, n: int, size: int) -> np.ndarray:
    """n independent permutations of 0 … size−1, [n, size]."""
    return rng.permuted(np.tile(np.arange(size), (n, 1)), axis=1)


def _prefix(target, rank, records, slack, rng):
    """All records move together: [n, R, m]."""
    return target[..., None] + RECORD_LENGTH * (np.arange(records) - rank[:, None, None])


def _target(target, rank, records, slack, rng):
    """The target moves alone, in a slot of R − 1 spare tokens; every other record stays where it is: [n, R, m]."""
    residues = target.shape[1]
    k = np.arange(records)
    start = target.min(axis=1)
    others = start[:, None] + RECORD_LENGTH * (k - rank[:, None]) + (residues - 1) * (k > rank[:, None])
    return np.where(k == rank[:, None, None], target[..., None], others[:, None, :])


def _insequence(target, rank, records, slack, rng):
    """The gaps between records are drawn anew in every replica, given where the target is: [n, R, m].

    Before and after the target every way to spread the filler over the gaps is equally likely.
    """
    n, residues = target.shape
    rank = np.broadcast_to(rank[:, None], (n, residues))
    before_filler = target - 1 - RECORD_LENGTH * rank
    before = _spread(rng, rank, before_filler, records)
    after = _spread(rng, records - 1 - rank, slack - before_filler, records)
    k = np.arange(records)
    # Records after the target count from the end of the target; their k-th is rank + 1 + k.
    shifted = np.take_along_axis(after, np.clip(k - rank[..., None] - 1, 0, records - 1), axis=2)
    position = np.where(k < rank[..., None], 1 + before, target[..., None] + RECORD_LENGTH + shifted)
    return np.where(k == rank[..., None], target[..., None], position)


def _spread(rng, count: np.ndarray, filler: np.ndarray, most: int) -> np.ndarray:
    """Start of the k-th of `count` records among `filler` single tokens in random order, [..., most] (rest unused)."""
    units = int((count + filler).max())
    keys = rng.random((*count.shape, max(units, 1)))
    keys[np.arange(keys.shape[-1]) >= (count + filler)[..., None]] = np.inf
    chosen = np.argsort(keys, axis=-1)[..., :most].astype(np.int64)
    k = np.arange(chosen.shape[-1])
    chosen = np.sort(np.where(k < count[..., None], chosen, units), axis=-1)
    starts = chosen + (RECORD_LENGTH - 1) * k
    return np.pad(starts, [(0, 0)] * count.ndim + [(0, most - starts.shape[-1])])


_PLACE = {"prefix": _prefix, "insequence": _insequence, "target": _target}


def distractor_dependence(position: np.ndarray, rank: np.ndarray) -> dict:
    """How the distractors' residues depend on the target's, for record positions [n, R, m] and target ranks [n].

    `cramers_v`: association of the two residues over all distractors; 0 means that a target on any residue meets the
    same mix of distractor residues. `lockstep`: mean over distractors of |mean over replicas of exp(2πi·(distractor −
    target)/R)|²; 1 where a distractor moves with the target, about 1/R where it is redrawn, 0 where it stays.
    """
    _, residues, records = position.shape
    if records == 1:
        return {"cramers_v": None, "lockstep": None}
    distractor = np.arange(records) != rank[:, None]
    found = position.transpose(0, 2, 1)[distractor] % residues
    cell = found + residues * np.arange(residues)
    table = np.bincount(cell.ravel(), minlength=residues**2).reshape(residues, residues)
    turned = np.exp(2j * np.pi * (found - np.arange(residues)) / residues)
    return {
        "cramers_v": float(scipy.stats.contingency.association(table[:, table.any(axis=0)], method="cramer")),
        "lockstep": float(np.mean(np.abs(turned.mean(axis=1)) ** 2)),
    }
