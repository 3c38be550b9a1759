"""Training data of the recall task, made fresh for every step by array operations (SPEC §9).

A sequence is BOS, records (an animal, then its name) with filler among them, the query mark, and query pairs: an animal
of the records, then its name, which is what the loss asks for.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from phase_jax.data.prompts import RECORD_LENGTH, RESIDUES, slack_of
from phase_jax.data.vocabulary import Vocabulary
from phase_jax.errors import UserError


class Stage(NamedTuple):
    """A stage of training: the share of the steps after which it ends, and what its sequences hold.

    Where they are None, `queries` and the `batch` of sequences a step are the run's, and records take any `words`.
    """

    share: float
    records: int
    length: int
    queries: int | None = None
    batch: int | None = None
    words: int | None = None


@dataclasses.dataclass(frozen=True)
class RecallConfig:
    """The recall task: what training sequences and evaluation prompts hold.

    `curriculum` is a sequence of stages, as the fields of Stage from the first on; evaluation has `records`, `length`,
    `demonstrations` and at least `closing_filler` filler tokens between the records and these. Raises UserError for
    sizes that do not fit, in training or in evaluation.
    """

    words: int = 64
    names: int | None = None  # None: as many as words
    records: int = 16
    length: int = 104
    demonstrations: int = 8
    closing_filler: int = 0
    queries: int = 16
    gap_share: float = 0.5  # of the training sequences, those with filler between records
    curriculum: tuple[tuple, ...] = ((1.0, 16, 104),)

    def __post_init__(self):
        slack_of(self.vocabulary, residues=RESIDUES, **self.prompt_sizes)  # raises where evaluation would
        stages = [self._complete(stage) for stage in self.curriculum]
        for _, records, length, queries, _, words in stages:
            if not records <= words <= self.words:
                raise UserError(
                    f"{records} records need as many single-token words of a kind; data.words is {self.words}"
                )
            shortest = 1 + RECORD_LENGTH * records + 1 + RECORD_LENGTH * queries
            if length < shortest:
                raise UserError(
                    f"length {length} is too short for {records} records and {queries} queries:"
                    f" it needs {shortest} tokens or more"
                )
        if not stages or stages[-1].share != 1.0:
            raise UserError("data.curriculum must end with a stage whose share of the steps is 1.0")

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.words, self.names)

    @property
    def prompt_sizes(self) -> dict[str, int]:
        """What evaluation prompts hold, as `phase_prompts` names it."""
        return {name: getattr(self, name) for name in ("length", "records", "demonstrations", "closing_filler")}

    def stage(self, step: int, steps: int) -> Stage:
        """The stage of a training step, 0 ≤ step < steps; its batch may be None."""
        return next(stage for stage in map(self._complete, self.curriculum) if step < stage.share * steps)

    def _complete(self, stage: tuple) -> Stage:
        stage = Stage(*stage)
        return stage._replace(
            queries=self.queries if stage.queries is None else stage.queries,
            words=self.words if stage.words is None else stage.words,
        )


class RecallBatch(NamedTuple):
    """Tokens [B, T] and, for the queries alone, where they are asked [Q] and the right next token [B, Q]."""

    tokens: jax.Array
    asked_at: jax.Array
    answer: jax.Array


@partial(jax.jit, static_argnames=("vocabulary", "batch", "records", "length", "queries", "words"))
def recall_batch(
    key: jax.Array,
    *,
    vocabulary: Vocabulary,
    batch: int,
    records: int,
    length: int,
    queries: int,
    gap_share: float,
    words: int | None = None,
) -> RecallBatch:
    """One batch, of the first `words` words of each kind (all where None); a function of the key alone."""
    words = words or vocabulary.words
    keys = jax.random.split(key, 6)

    def shuffled(key, size):
        return jnp.argsort(jax.random.uniform(key, (batch, size)), axis=1)

    animal = vocabulary.first_animal + shuffled(keys[0], words)[:, :records]
    name = vocabulary.name(shuffled(keys[1], words)[:, :records])

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
    """The batch of one training step, of `batch` sequences where its stage does not say: a function of (key, step)."""
    stage = config.stage(step, steps)
    return recall_batch(
        jax.random.fold_in(key, step),
        vocabulary=config.vocabulary,
        batch=stage.batch or batch,
        records=stage.records,
        length=stage.length,
        queries=stage.queries,
        gap_share=config.gap_share,
        words=stage.words,
    )
