"""Which tokens a prompt is made of: keys, values and filler of one tokenizer, no two of them alike."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from phase_jax.data.tokenizers import Tokenizer, single_tokens, token_of, vocabulary_words
from phase_jax.data.words import ANIMALS, NAMES
from phase_jax.errors import UserError

_LISTS = {"animals": ANIMALS, "names": NAMES}
CHOICES = ("words", "numeric", *_LISTS)
_FILLER_SHARE = 0.1  # of the words that are in neither list
_WORDS = 3  # purpose of the random stream that shares the words out


@dataclasses.dataclass(frozen=True)
class Lexicon:
    """Token ids of a task: disjoint arrays `keys`, `values` and `filler`, and what follows a key and a value.

    `bos` stands at position 0; where it is None a filler token does, so that positions are the same.
    """

    keys: np.ndarray
    values: np.ndarray
    filler: np.ndarray
    after_key: tuple[int, ...]
    after_value: tuple[int, ...]
    bos: int | None

    @property
    def record_length(self) -> int:
        return 2 + len(self.after_key) + len(self.after_value)


def make_lexicon(
    tokenizer: Tokenizer,
    keys: str,
    values: str,
    *,
    bos: int | None,
    after_key: str = "",
    after_value: str = "",
    seed: int,
) -> Lexicon:
    """The lexicon of a tokenizer, a function of its arguments.

    `keys` and `values` are `animals`, `names` (those that are one token with a space before), `numeric` (tokens of
    digits), the path of a list of words, or `words`: a share of all English words of the vocabulary, drawn by the
    seed. Raises UserError for a word of a list that is more than one token, an overlap, or too few words.
    """
    chosen = [_chosen(tokenizer, choice) for choice in (keys, values)]
    listed = [ids for ids in chosen if ids is not None]
    if len(listed) == 2 and np.intersect1d(*listed).size:
        raise UserError(f"--keys {keys} and --values {values} have words in common: choose lists that do not overlap")
    free = np.setdiff1d(vocabulary_words(tokenizer), np.concatenate([np.zeros(0, np.int64), *listed]))
    if not free.size:
        raise UserError(f"tokenizer '{tokenizer.name}' has no words of one token to fill a prompt with: choose another")
    free = np.random.default_rng([seed, _WORDS]).permutation(free)
    cut = len(free) if len(listed) == 2 else max(1, round(_FILLER_SHARE * len(free)))
    shares = iter(np.array_split(free[cut:], max(1, 2 - len(listed))))
    keys, values = (next(shares) if ids is None else ids for ids in chosen)

    def tokens(text: str) -> tuple[int, ...]:
        return tuple(token_of(tokenizer, letter) for letter in text)

    return Lexicon(keys, values, free[:cut], tokens(after_key), tokens(after_value), bos)


def _chosen(tokenizer: Tokenizer, choice: str) -> np.ndarray | None:
    """The ids of a choice; None for `words`, which takes what the others leave."""
    if choice == "words":
        return None
    if choice == "numeric":
        return vocabulary_words(tokenizer, digits=True)
    if choice in _LISTS:
        return np.array(list(single_tokens(tokenizer, _LISTS[choice]).values()), np.int64)
    return np.array([token_of(tokenizer, f" {word}") for word in _read_words(Path(choice))], np.int64)


def _read_words(path: Path) -> Iterable[str]:
    """The words of a list, one a line. Raises UserError where there is no such text, or a word occurs twice."""
    try:
        words = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no list of words ({error}): choose {', '.join(CHOICES)} or a text file") from error
    if len(set(words)) < len(words):
        twice = next(word for i, word in enumerate(words) if word in words[:i])
        raise UserError(f"{path} has the word '{twice}' twice: keys and values are drawn without replacement")
    return words
