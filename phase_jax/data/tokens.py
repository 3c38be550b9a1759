"""What language-model training reads: packed sequences of tokens, each with the token that follows."""

from typing import NamedTuple

import jax

from phase_jax.axes import Tokens


class TokenBatch(NamedTuple):
    """Tokens [B, T], the token that follows each [B, T], and whether the loss counts it [B, T], a bool or a weight."""

    tokens: Tokens
    targets: Tokens
    counted: jax.Array
