"""The lab's vocabulary: three marks, then animals and names, one token each."""

import dataclasses

from phase_jax.data.words import ANIMALS, NAMES
from phase_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Token ids of the recall task: three marks, then `words` animals, then as many names, or only `names` of them.

    Where there are fewer names than records, records share them evenly. Words beyond those that are listed are
    numbered. Raises UserError where there is no word.
    """

    words: int = 64
    names: int | None = None

    bos: int = dataclasses.field(default=0, init=False)
    filler: int = dataclasses.field(default=1, init=False)
    query_mark: int = dataclasses.field(default=2, init=False)
    first_animal: int = dataclasses.field(default=3, init=False)

    def __post_init__(self):
        for field in ("words", "names"):
            if (count := getattr(self, field)) is not None and count < 1:
                raise UserError(f"data.{field} {count}: at least one word of a kind is needed")

    @property
    def first_name(self) -> int:
        return self.first_animal + self.words

    @property
    def size(self) -> int:
        """V, the number of token ids."""
        return self.first_name + (self.names or self.words)

    def name(self, number):
        """The token of a number from 0 to words − 1, as a Python number or an array: the names' in turn."""
        return self.first_name + number % (self.names or self.words)

    def text(self, tokens) -> str:
        """Token ids as a person reads them."""
        words = [
            "<bos>",
            ".",
            "?",
            *_first(self.words, ANIMALS, "animal"),
            *_first(self.names or self.words, NAMES, "name"),
        ]
        return " ".join(words[int(token)] for token in tokens)


def _first(count: int, listed: list[str], kind: str) -> list[str]:
    return [*listed, *(f"{kind}{i}" for i in range(len(listed), count))][:count]
