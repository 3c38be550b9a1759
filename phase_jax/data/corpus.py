"""A corpus: documents tokenised once into ArrayRecord shards, and the batches that training reads from them.

<corpus>/corpus.json               what it was made of: tokenizer, sizes, counts, a hash of the content
         train-00000.array_record  records of `record_tokens` tokens and the one that follows, packed without padding
         held_out-00000.array_record    the same of the documents that training never sees
"""

import dataclasses
import hashlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from phase_jax.data.tokenizers import Tokenizer, load_tokenizer
from phase_jax.data.tokens import TokenBatch
from phase_jax.errors import UserError

SPLITS = ("train", "held_out")
_SHARD_TOKENS = 2**26
_ENCODED_AT_ONCE = 256  # documents


@dataclasses.dataclass(frozen=True)
class TextConfig:
    """What a language model is trained on: a corpus, the tokenizer it must be of, tokens in a sequence."""

    corpus: str
    tokenizer: str = "bytes"
    length: int = 256

    def __post_init__(self):
        if self.length < 1:
            raise UserError(f"data.length is {self.length}: it must be at least 1")


def write_corpus(
    documents: Iterable[str],
    tokenizer: Tokenizer,
    folder: Path,
    *,
    source: str,
    record_tokens: int = 4096,
    held_out: float = 0.05,
    shard_tokens: int = _SHARD_TOKENS,
    progress: Callable[[int, int], None] = lambda documents, tokens: None,
) -> dict:
    """Tokenises documents into a new corpus folder; returns corpus.json's content.

    Every document is followed by the end-of-text token, and the sequence is cut into records, each of which repeats the
    last token of the one before it, so that every token is predicted once; what is left at the end and fills no record
    is dropped, and counted. A document is held out if a hash of its text says so, on average `held_out` of them: in
    any order, and copies together. The folder appears when all is written. Raises UserError where it exists, the
    tokenizer has no end of text, or a split gets no record.
    """
    if folder.exists():
        raise UserError(f"{folder} exists: choose another --out or remove it")
    if tokenizer.end_of_text is None:
        raise UserError(f"tokenizer '{tokenizer.name}' has no end-of-text token to put between documents")
    if not 0 < held_out < 1 or record_tokens < 1:
        raise UserError(f"--held-out {held_out} must lie between 0 and 1, and --record-tokens {record_tokens} above 0")
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        writers = {split: _SplitWriter(partial, split, tokenizer, record_tokens, shard_tokens) for split in SPLITS}
        seen = 0
        for texts in _groups(documents, _ENCODED_AT_ONCE):
            for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
                writers["held_out" if _hash_share(text) < held_out else "train"].add(ids)
            seen += len(texts)
            progress(seen, sum(writer.tokens for writer in writers.values()))
        about = {
            "source": source,
            "tokenizer": {"name": tokenizer.name, "hash": tokenizer.hash, "size": tokenizer.size},
            "record_tokens": record_tokens,
            "dtype": writers["train"].dtype.str,
            "splits": {split: writer.close() for split, writer in writers.items()},
        }
        for split, counts in about["splits"].items():
            if not counts["records"]:
                raise UserError(
                    f"the {split} split has {counts['tokens']} tokens of {counts['documents']} documents, too few for a"
                    f" record of {record_tokens}: give more text, another --held-out or fewer --record-tokens"
                )
        (partial / "corpus.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return about


class _SplitWriter:
    """Packs token ids into the shards of one split."""

    def __init__(self, folder: Path, split: str, tokenizer: Tokenizer, record_tokens: int, shard_tokens: int):
        self._folder, self._split, self._end = folder, split, tokenizer.end_of_text
        self._length, self._shard_records = record_tokens, max(1, shard_tokens // record_tokens)
        self.dtype = np.dtype("<u2" if tokenizer.size <= 2**16 else "<u4")
        self._waiting = np.zeros(0, self.dtype)
        self._writer, self._hash = None, hashlib.sha256()
        self.tokens = self._documents = self._records = 0

    def add(self, ids: Sequence[int]) -> None:
        self._documents += 1
        self.tokens += len(ids) + 1
        self._waiting = np.concatenate([self._waiting, np.asarray([*ids, self._end], self.dtype)])
        whole = max(0, len(self._waiting) - 1) // self._length
        for start in range(0, whole * self._length, self._length):
            self._write(self._waiting[start : start + self._length + 1].tobytes())
        self._waiting = self._waiting[whole * self._length :]

    def _write(self, record: bytes) -> None:
        from array_record.python.array_record_module import ArrayRecordWriter

        if self._records % self._shard_records == 0:
            self._close_shard()
            path = self._folder / f"{self._split}-{self._records // self._shard_records:05}.array_record"
            with self._written():
                self._writer = ArrayRecordWriter(str(path), "group_size:1,zstd:3")
        with self._written():
            self._writer.write(record)
        self._hash.update(record)
        self._records += 1

    def _close_shard(self) -> None:
        if self._writer is not None:
            with self._written():
                self._writer.close()
            self._writer = None

    @contextmanager
    def _written(self) -> Iterator[None]:
        """What the writer raises, as one line."""
        try:
            yield
        except (RuntimeError, ValueError, OSError) as error:
            reason = str(error).partition(";")[0]
            raise UserError(
                f"{self._folder} could not be written ({reason}); nothing is kept: make room and begin again"
            ) from error

    def close(self) -> dict:
        """What corpus.json says of the split."""
        self._close_shard()
        return {
            "documents": self._documents,
            "tokens": self.tokens,
            "records": self._records,
            "dropped_tokens": max(0, len(self._waiting) - 1),
            "hash": self._hash.hexdigest(),
        }


def _groups(items: Iterable, size: int) -> Iterator[list]:
    """Lists of up to `size` items."""
    items = iter(items)
    while group := list(itertools.islice(items, size)):
        yield group


def _hash_share(text: str) -> float:
    """A number in [0, 1) that is a function of the text and as good as uniform."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") / 2**64


class Corpus:
    """A corpus that was written before, opened to be read."""

    def __init__(self, folder: Path):
        """Raises UserError where there is none, or a shard is missing or short."""
        from array_record.python.array_record_data_source import ArrayRecordDataSource

        described = folder / "corpus.json"
        if not described.is_file():
            raise UserError(
                f"{folder} is no corpus (no corpus.json): make one with phase-jax corpus --out {folder} and the"
                " --tokenizer that the run's data.tokenizer names"
            )
        try:
            self.about = json.loads(described.read_text(encoding="utf-8"))
            self.record_tokens, self.dtype = self.about["record_tokens"], np.dtype(self.about["dtype"])
            wanted = {split: self.about["splits"][split]["records"] for split in SPLITS}
            self.hash = hashlib.sha256(described.read_bytes()).hexdigest()
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{described} does not describe a corpus ({error}): make it again") from error
        self.folder, self._records = folder, {}
        for split in SPLITS:
            paths = sorted(map(str, folder.glob(f"{split}-*.array_record")))
            try:
                self._records[split] = ArrayRecordDataSource(paths)
                found = len(self._records[split])
            except (ValueError, RuntimeError, OSError) as error:
                raise UserError(f"a {split} shard of {folder} cannot be read ({error}): make it again") from error
            if found != wanted[split]:
                raise UserError(f"{folder} has {found} {split} records, not {wanted[split]}: make it again")

    def check(self, config: TextConfig, vocabulary: int) -> None:
        """Raises UserError where a run's tokenizer, vocabulary or length do not fit the corpus."""
        made, wanted = self.about["tokenizer"], load_tokenizer(config.tokenizer)
        if made["hash"] != wanted.hash:
            raise UserError(
                f"{self.folder} is of tokenizer '{made['name']}', the run's data.tokenizer is '{config.tokenizer}'"
            )
        if vocabulary < made["size"]:
            raise UserError(f"model.vocabulary {vocabulary} is smaller than tokenizer '{made['name']}': {made['size']}")
        if self.record_tokens % config.length:
            raise UserError(
                f"data.length {config.length} does not divide the {self.record_tokens} tokens of a record of"
                f" {self.folder}"
            )

    def sequences(self, split: str, length: int) -> int:
        """How many sequences of `length` tokens a split has."""
        return len(self._records[split]) * (self.record_tokens // length)

    def read(self, split: str, length: int, which: np.ndarray) -> TokenBatch:
        """The sequences of those numbers: numpy arrays [B, T], all tokens counted."""
        record, part = np.divmod(which, self.record_tokens // length)
        try:
            found = self._records[split].__getitems__(record.tolist())
        except (ValueError, RuntimeError, IndexError) as error:
            raise UserError(f"a {split} record of {self.folder} cannot be read ({error}): make it again") from error
        tokens = np.stack(
            [np.frombuffer(x, self.dtype)[p * length : (p + 1) * length + 1] for x, p in zip(found, part, strict=True)]
        ).astype(np.int32)
        return TokenBatch(tokens[:, :-1], tokens[:, 1:], np.ones((len(which), length), bool))


def shuffled(sequences: int, batch: int, seed: int):
    """A grain.MapDataset, step -> sequence numbers [batch]: every epoch another permutation, without end."""
    import grain

    # Grain adds the epoch to the seed, so neighbouring seeds would meet the same orders.
    spread = int(np.random.SeedSequence(seed).generate_state(1)[0])
    return grain.MapDataset.range(sequences).shuffle(spread).repeat().batch(batch)
