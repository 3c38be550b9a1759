"""The lab's vocabulary: three marks, then animals and names, one token each."""

import dataclasses

from phase_jax.errors import UserError

ANIMALS = (
    "ant ape badger bat bear beaver bee bison boar camel cat cheetah cobra cow crab crane crow deer dog dolphin dove"
    " duck eagle eel elk falcon ferret finch fox frog gecko goat goose gull hare hawk heron horse hyena jackal koala"
    " lemur lion lizard llama lynx mole moose mouse newt otter owl panda parrot pig puma rabbit raven seal shark sheep"
    " snail swan tiger"
).split()

NAMES = (
    "Ada Alan Alice Amos Anna Ben Bella Boris Carl Clara Cora Dan Dora Edith Elias Emma Erik Eva Felix Flora Frank"
    " Fred Gina Grace Greta Hans Hugo Ida Igor Ines Iris Ivan Jack Jane Jonas Julia Karl Kate Lars Laura Leo Lena Lily"
    " Lucas Maria Mark Max Mia Nina Nora Oscar Otto Paul Peter Rosa Ruth Sam Sara Simon Tess Thea Tom Vera Walter"
).split()


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Token ids of the recall task: three marks, then `words` animals, then as many names.

    Raises UserError where more words are asked for than there are.
    """

    words: int = len(ANIMALS)

    bos: int = dataclasses.field(default=0, init=False)
    filler: int = dataclasses.field(default=1, init=False)
    query_mark: int = dataclasses.field(default=2, init=False)
    first_animal: int = dataclasses.field(default=3, init=False)

    def __post_init__(self):
        if not 1 <= self.words <= min(len(ANIMALS), len(NAMES)):
            raise UserError(
                f"data.words {self.words}: the lab has from 1 to {len(ANIMALS)} single-token words of a kind"
            )

    @property
    def first_name(self) -> int:
        return self.first_animal + self.words

    @property
    def size(self) -> int:
        """V, the number of token ids."""
        return self.first_name + self.words

    def text(self, tokens) -> str:
        """Token ids as a person reads them."""
        words = ["<bos>", ".", "?", *ANIMALS[: self.words], *NAMES[: self.words]]
        return " ".join(words[int(token)] for token in tokens)
