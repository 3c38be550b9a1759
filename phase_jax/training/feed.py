"""What a run reads, step by step, from any step on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import grain
import jax
import numpy as np
from jax.sharding import Mesh

from phase_jax.data.corpus import Corpus, TextConfig, shuffled
from phase_jax.data.recall import RecallBatch, batch_for_step
from phase_jax.data.tokens import TokenBatch
from phase_jax.errors import UserError
from phase_jax.run import RunConfig
from phase_jax.training.sharding import batch_parts, make_mesh, process_rows

# Purposes of randomness: each is folded into the run's one seed.
INIT, TRAIN, VALIDATE = range(3)


def purpose_key(seed: int, purpose: int) -> jax.Array:
    """The random key of one purpose of a run."""
    return jax.random.fold_in(jax.random.key(seed), purpose)


class Feed(Protocol):
    """The batches of a run in order; `get_state` is JSON that `set_state` continues from, in another process too."""

    def __next__(self): ...

    def get_state(self) -> dict: ...

    def set_state(self, state: dict) -> None: ...

    def name(self, step: int) -> str:
        """Says which data the batch of a step holds, so that a person finds them."""
        ...

    def held_out(self) -> Iterator:
        """Batches that no step sees, the same ones in every call."""
        ...


class RecallFeed:
    """Fresh batches of the recall task: each is a function of the run's seed and of its step."""

    def __init__(self, config: RunConfig, mesh: Mesh):
        self._config, self._key, self._step = config, purpose_key(config.seed, TRAIN), 0
        self._rows = process_rows(mesh, config.train.batch)

    def __next__(self) -> RecallBatch:
        batch = self._batch(self._step, self._key)
        self._step += 1
        return batch

    def _batch(self, step: int, key: jax.Array) -> RecallBatch:
        train = self._config.train
        batch = batch_for_step(self._config.data, train.batch, step, train.steps, key)
        if jax.process_count() == 1:
            return batch
        return batch._replace(tokens=batch.tokens[self._rows], answer=batch.answer[self._rows])

    def get_state(self) -> dict:
        return {"next_index": self._step}

    def set_state(self, state: dict) -> None:
        self._step = state["next_index"]

    def name(self, step: int) -> str:
        return f"the recall batch of seed {self._config.seed}, step {step}"

    def held_out(self) -> Iterator[RecallBatch]:
        """Of the last training stage."""
        key, train = purpose_key(self._config.seed, VALIDATE), self._config.train
        return (self._batch(train.steps - 1, jax.random.fold_in(key, i)) for i in range(train.validation_batches))


class TextFeed:
    """Batches of a corpus in the run's own order; each process reads its own rows of every batch.

    The order is a function of the seed alone, whatever the number of processes. Raises UserError where the corpus does
    not fit the run.
    """

    def __init__(self, config: RunConfig, mesh: Mesh):
        process_rows(mesh, config.train.batch)
        self._config, self._mesh, self._corpus = config, mesh, Corpus(Path(config.data.corpus))
        self._corpus.check(config.data, config.model.vocabulary)
        held_out, parts = self._corpus.sequences("held_out", config.data.length), batch_parts(mesh)
        if held_out < parts:
            raise UserError(
                f"{self._corpus.folder} holds out {held_out} sequences, fewer than the mesh's {parts} parts"
            )
        self._available = held_out - held_out % parts
        self._order = shuffled(self._corpus.sequences("train", config.data.length), config.train.batch, config.seed)
        steps = self._order.map(lambda which: self._read("train", which))
        self._steps = iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)))

    def _read(self, split: str, which: np.ndarray) -> TokenBatch:
        """This process's rows of a batch."""
        return self._corpus.read(split, self._config.data.length, which[process_rows(self._mesh, len(which))])

    def __next__(self) -> TokenBatch:
        return next(self._steps)

    def get_state(self) -> dict:
        return {**self._steps.get_state(), "corpus": self._corpus.hash}

    def set_state(self, state: dict) -> None:
        """Raises UserError where the corpus is no longer the one that the state is of."""
        if state["corpus"] != self._corpus.hash:
            raise UserError(f"{self._corpus.folder} is not the corpus that this run began with: restore that one")
        self._steps.set_state({name: value for name, value in state.items() if name != "corpus"})

    def name(self, step: int) -> str:
        which = ", ".join(map(str, self._order[step]))
        return f"training sequences {which} of {self._corpus.folder} (seed {self._config.seed}, step {step})"

    def held_out(self) -> Iterator[TokenBatch]:
        """Of the held-out documents, from their beginning: as many whole batches as there are, or the one there is."""
        train = self._config.train
        size = min(train.batch, self._available)
        batches = min(train.validation_batches, self._available // size)
        return (self._read("held_out", np.arange(i * size, (i + 1) * size)) for i in range(batches))


def open_feed(config: RunConfig, mesh: Mesh | None = None) -> Feed:
    """The feed of a run, at its first step; it yields the rows that this process has to `place` on the mesh.

    By default the mesh is one device's.
    """
    mesh = make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh
    return TextFeed(config, mesh) if isinstance(config.data, TextConfig) else RecallFeed(config, mesh)
