"""Prompts for a tokenizer's ids: many records, one of them asked for, on every residue (SPEC §4, §5).

A prompt is BOS, filler, records with filler between them (`insequence`, `target`) or not (`prefix`), filler,
demonstrations, and the target's key with what follows a key; the next token is its value. All prompts of a task have
one length, and so one query position. Samples are made one at a time, each a function of (seed, its index): the whole
of a task need never be in memory. Keys, values, filler, gaps and demonstrations are drawn from streams of their own.
"""

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from phase_jax.data.lexicon import Lexicon
from phase_jax.data.padding import PROTOCOLS, DistractorDependence, Protocol, place_records
from phase_jax.data.positions import Placement, least_slack, matching, place_targets
from phase_jax.errors import UserError

_KEYS, _VALUES, _FILLER, _GAPS, _DEMONSTRATIONS = range(4, 9)  # purposes of a sample's random streams


class Sample(NamedTuple):
    """One logical sample on R residues: tokens [R, T], positions of the records' keys [R, m], the right answer."""

    tokens: np.ndarray
    record_position: np.ndarray
    answer: int


@dataclasses.dataclass(frozen=True)
class Task:
    """A set of `samples` · `residues` prompts of `tokens` tokens each.

    At least `closing_filler` filler tokens stand between the last record and what closes the prompt. Raises UserError
    for an impossible size, naming the setting.
    """

    lexicon: Lexicon
    protocol: Protocol
    tokens: int
    records: int
    residues: int
    samples: int
    demonstrations: int
    closing_filler: int
    seed: int

    def __post_init__(self):
        for field, least in (("records", 1), ("residues", 2), ("samples", 1), ("closing_filler", 0), ("seed", 0)):
            if getattr(self, field) < least:
                raise UserError(f"--{field.replace('_', '-')} {getattr(self, field)}: it must be {least} or more")
        if self.protocol not in PROTOCOLS:
            raise UserError(f"unknown protocol '{self.protocol}'; choose {', '.join(PROTOCOLS)}")
        if not 0 <= self.demonstrations < self.records:
            raise UserError(
                f"--demonstrations {self.demonstrations}: choose from 0 to {self.records - 1}, all but the target"
            )
        for kind in ("keys", "values"):
            if self.records > len(getattr(self.lexicon, kind)):
                raise UserError(
                    f"--records {self.records}: {kind} are drawn without replacement, and the tokenizer has"
                    f" {len(getattr(self.lexicon, kind))} for them; choose fewer records or other --{kind}"
                )
        least = self.tokens - self.slack + least_slack(self.residues, self.records, self.lexicon.record_length)
        if self.tokens < least:
            raise UserError(
                f"--tokens {self.tokens}: {self.records} records of {self.lexicon.record_length} tokens on"
                f" {self.residues} residues at matched positions need {least} or more"
            )

    @property
    def closing_length(self) -> int:
        """Tokens from the first demonstration to the end."""
        lexicon = self.lexicon
        return lexicon.record_length * self.demonstrations + 1 + len(lexicon.after_key)

    @property
    def slack(self) -> int:
        """Filler tokens before, between and after the records together, those that must follow them left out."""
        records = self.records * self.lexicon.record_length
        return self.tokens - 1 - records - self.closing_filler - self.closing_length

    @cached_property
    def placement(self) -> Placement:
        return place_targets(
            self.samples, self.residues, self.records, self.lexicon.record_length, self.slack, self.seed
        )

    def __iter__(self) -> Iterator[Sample]:
        return (self.sample(i) for i in range(self.samples))

    def sample(self, i: int) -> Sample:
        """The i-th logical sample."""
        lexicon, m = self.lexicon, self.records

        def stream(purpose: int) -> np.random.Generator:
            return np.random.default_rng([self.seed, purpose, i])

        keys = stream(_KEYS).choice(lexicon.keys, m, replace=False)
        values = stream(_VALUES).choice(lexicon.values, m, replace=False)
        columns = (keys, *lexicon.after_key, values, *lexicon.after_value)
        records = np.stack([np.broadcast_to(column, m) for column in columns], axis=1)

        rank, target = self.placement.rank[i], self.placement.position[i]
        (position,) = place_records(
            self.protocol,
            target[None],
            rank[None],
            records=m,
            length=lexicon.record_length,
            slack=self.slack,
            rng=stream(_GAPS),
        )
        shown = stream(_DEMONSTRATIONS).permutation(m - 1)[: self.demonstrations]
        shown = shown + (shown >= rank)

        background = stream(_FILLER).choice(lexicon.filler, self.tokens).astype(np.int32)
        if lexicon.bos is not None:
            background[0] = lexicon.bos
        background[-self.closing_length :] = [*records[shown].ravel(), keys[rank], *lexicon.after_key]
        tokens = np.tile(background, (self.residues, 1))
        for part in range(lexicon.record_length):
            np.put_along_axis(tokens, position + part, records[None, :, part].astype(np.int32), axis=1)
        self._assert_positions(tokens, position, keys, rank)
        return Sample(tokens, position.astype(np.int32), int(values[rank]))

    def _assert_positions(self, tokens: np.ndarray, position: np.ndarray, keys: np.ndarray, rank: int) -> None:
        """Reads every record's position back from the ids: keys stand there and nowhere else before the closing."""
        is_key = np.zeros(max(tokens.max(), self.lexicon.keys.max()) + 1, bool)
        is_key[self.lexicon.keys] = True
        before = tokens[:, : -self.closing_length]
        row, column = np.nonzero(is_key[before])
        assert len(row) == position.size and (column.reshape(position.shape) == position).all()
        assert (before[row, column].reshape(position.shape) == keys).all()
        assert (position[:, rank] % self.residues == np.arange(self.residues)).all()

    def checks(self, dependence: DistractorDependence) -> dict:
        """What a run stores of its positions: how well targets match over residues, and distractors' dependence."""
        return {**matching(self.placement.position), "distractors": dependence.report()}
