"""Phase-evaluation prompts of the recall task: every logical sample on every residue (SPEC §4).

A prompt is BOS, filler, records with filler between them (`insequence`, `target`) or not (`prefix`), filler, the query
mark, demonstrations, and the target's animal as the last token; a record is an animal and then its name. All prompts
of a run have one length and one query position.
"""

import dataclasses

import numpy as np

from phase_jax.data.padding import PROTOCOLS, DistractorDependence, Protocol, place_records
from phase_jax.data.positions import least_slack, matching, place_targets
from phase_jax.data.vocabulary import Vocabulary
from phase_jax.errors import UserError

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


def slack_of(
    vocabulary: Vocabulary, *, length: int, records: int, demonstrations: int, closing_filler: int, residues: int
) -> int:
    """Filler tokens before, between and after the records together, `closing_filler` that must follow them left out.

    Raises UserError for sizes of which no prompts can be made: fewer words than records, demonstrations that do not
    leave the target out, or a length in which the target cannot be matched over residues.
    """
    if records > vocabulary.words:
        raise UserError(
            f"{records} records need as many single-token words of a kind; data.words is {vocabulary.words}"
        )
    if not 0 <= demonstrations < records:
        raise UserError(f"{demonstrations} demonstrations: choose from 0 to {records - 1}, all records but the target")
    if closing_filler < 0:
        raise UserError(f"closing filler {closing_filler}: it must be 0 or more")
    slack = length - 1 - RECORD_LENGTH * records - closing_filler - closing_length(demonstrations)
    missing = least_slack(residues, records, RECORD_LENGTH) - slack
    if missing > 0:
        raise UserError(
            f"prompt length {length} is too short for {records} records and {demonstrations} demonstrations with the"
            f" target on {residues} residues at matched positions: it needs {length + missing} or more"
        )
    return slack


def phase_prompts(
    vocabulary: Vocabulary,
    protocol: Protocol,
    n: int,
    *,
    length: int,
    records: int,
    demonstrations: int,
    closing_filler: int = 0,
    seed: int,
    residues: int = RESIDUES,
) -> PhasePrompts:
    """Builds n logical samples on `residues` residues each; a function of its arguments alone.

    At least `closing_filler` filler tokens follow the last record. Raises UserError where there is no sample, and where
    `slack_of` does.
    """
    if n < 1:
        raise UserError(f"--logical {n}: at least one logical sample is needed")
    if protocol not in PROTOCOLS:
        raise UserError(f"unknown protocol '{protocol}'; choose {', '.join(PROTOCOLS)}")
    slack = slack_of(
        vocabulary,
        length=length,
        records=records,
        demonstrations=demonstrations,
        closing_filler=closing_filler,
        residues=residues,
    )
    placement = place_targets(n, residues, records, RECORD_LENGTH, slack, seed)
    rng = np.random.default_rng([seed, 1])
    rank, target = placement.rank, placement.position
    position = place_records(protocol, target, rank, records=records, length=RECORD_LENGTH, slack=slack, rng=rng)

    animals = _permutations(rng, n, vocabulary.words)[:, :records]
    names = _permutations(rng, n, vocabulary.words)[:, :records]
    pairs = np.stack([vocabulary.first_animal + animals, vocabulary.name(names)], axis=-1)
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

    distractors = DistractorDependence(residues)
    distractors.add(position, rank)
    checks = {**matching(target), "distractors": distractors.report()}
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
