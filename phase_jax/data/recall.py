"""Training data of the recall task, made fresh for every step by array operations (SPEC §9).

A sequence is BOS, records (an animal, then its name) with filler among them, the query mark, and query pairs: an animal
of the records, then its name, which is what the loss asks for.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from phase_jax.data.prompts import RECORD_LENGTH
from phase_jax.data.vocabulary import Vocabulary
from phase_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class RecallConfig:
    """The recall task: what training sequences and evaluation prompts hold.

    `curriculum` is a sequence of stages (share of the steps after which the stage ends, records, length); evaluation
    has `records`, `length` and `demonstrations`. Raises UserError for sizes that do not fit.
    """

    words: int = 64
    records: int = 16
    length: int = 104
    demonstrations: int = 8
    queries: int = 16
    gap_share: float = 0.5  # of the training sequences, those with filler between records
    curriculum: tuple[tuple[float, int, int], ...] = ((1.0, 16, 104),)

    def __post_init__(self):
        vocabulary = Vocabulary(self.words)
        for records, length in [(self.records, self.length), *(stage[1:] for stage in self.curriculum)]:
            if records > vocabulary.words:
                raise UserError(
                    f"{records} records need as many single-token words of a kind; data.words is {self.words}"
                )
            shortest = 1 + RECORD_LENGTH * records + 1 + RECORD_LENGTH * self.queries
            if length < shortest:
                raise UserError(
                    f"length {length} is too short for {records} records and {self.queries} queries:"
                    f" it needs {shortest} tokens or more"
                )
        if not self.curriculum or self.curriculum[-1][0] != 1.0:
            raise UserError("data.curriculum must end with a stage whose share of the steps is 1.0")

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.words)

    def stage(self, step: int, steps: int) -> tuple[int, int]:
        """(records, length) of a training step, 0 ≤ step < steps."""
        return next((records, length) for share, records, length in self.curriculum if step < share * steps)


class RecallBatch(NamedTuple):
    """Tokens [B, T] and, for the queries alone, where they are asked [Q] and the right next token [B, Q]."""

    tokens: jax.Array
    asked_at: jax.Array
    answer: jax.Array


@partial(jax.jit, static_argnames=("vocabulary", "batch", "records", "length", "queries"))
def recall_batch(
    key: jax.Array,
    *,
    vocabulary: Vocabulary,
    batch: int,
    records: int,
    length: int,
    queries: int,
    gap_share: float,
) -> RecallBatch:
    """One batch; a function of the key alone."""
    keys = jax.random.split(key, 6)

    def shuffled(key, size):
        return jnp.argsort(jax.random.uniform(key, (batch, size)), axis=1)

    animal = vocabulary.first_animal + shuffled(keys[0], vocabulary.words)[:, :records]
    name = vocabulary.first_name + shuffled(keys[1], vocabulary.words)[:, :records]

    slack = length - 1 - RECORD_LENGTH * records - 1 - RECORD_LENGTH * queries
    k = jnp.arange(records)
    scattered = jnp.sort(shuffled(keys[2], records + slack)[:, :records], axis=1) + (RECORD_LENGTH - 1) * k
    together = jax.random.randint(keys[3], (batch, 1), 0, slack + 1) + RECORD_LENGTH * k
    gaps = jax.random.bernoulli(keys[4], gap_share, (batch, 1))
    start = 1 + jnp.where(gaps, scattered, together)

    # With replacement: where every record is asked once, a model finds the last answers by elimination and need not
    # look any up.
    order = jax.random.randint(keys[5], (batch, queries), 0, records)
    pairs = jnp.stack([animal, name], axis=-1)
    asked = jnp.take_along_axis(pairs, order[..., None], axis=1)

    row = jnp.arange(batch)[:, None]
    tokens = jnp.full((batch, length), vocabulary.filler)
    tokens = tokens.at[:, 0].set(vocabulary.bos)
    tokens = tokens.at[row, start].set(animal).at[row, start + 1].set(name)
    closing = length - RECORD_LENGTH * queries
    tokens = tokens.at[:, closing - 1].set(vocabulary.query_mark)
    tokens = tokens.at[:, closing:].set(asked.reshape(batch, -1))
    return RecallBatch(tokens, closing + RECORD_LENGTH * jnp.arange(queries), asked[..., 1])


def batch_for_step(config: RecallConfig, batch: int, step: int, steps: int, key: jax.Array) -> RecallBatch:
    """The batch of one training step: a function of (key, step)."""
    records, length = config.stage(step, steps)
    return recall_batch(
        jax.random.fold_in(key, step),
        vocabulary=config.vocabulary,
        batch=batch,
        records=records,
        length=length,
        queries=config.queries,
        gap_share=config.gap_share,
    )
