"""The lab's vocabulary: three marks, then animals and names, one token each."""

import dataclasses

from phase_jax.data.words import ANIMALS, NAMES
from phase_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Token ids of the recall task: three marks, then `words` animals, then as many names.

    Words beyond those that have a name are numbered. Raises UserError where there is no word.
    """

    words: int = 64

    bos: int = dataclasses.field(default=0, init=False)
    filler: int = dataclasses.field(default=1, init=False)
    query_mark: int = dataclasses.field(default=2, init=False)
    first_animal: int = dataclasses.field(default=3, init=False)

    def __post_init__(self):
        if self.words < 1:
            raise UserError(f"data.words {self.words}: at least one word of a kind is needed")

    @property
    def first_name(self) -> int:
        return self.first_animal + self.words

    @property
    def size(self) -> int:
        """V, the number of token ids."""
        return self.first_name + self.words

    def text(self, tokens) -> str:
        """Token ids as a person reads them."""
        words = ["<bos>", ".", "?", *self._first(ANIMALS, "animal"), *self._first(NAMES, "name")]
        return " ".join(words[int(token)] for token in tokens)

    def _first(self, named: list[str], kind: str) -> list[str]:
        return [*named, *(f"{kind}{i}" for i in range(len(named), self.words))][: self.words]
