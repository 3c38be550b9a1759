"""What may be changed inside a forward pass (SPEC §7): a pytree that goes down through the layers as an argument.

Every leaf has a leading axis L, one part a layer, and what is None is left alone. Because an intervention is only an
argument, `jax.vmap` over a stack of them is a forward pass under each.
"""

from typing import NamedTuple

import jax


class Heads(NamedTuple):
    """Head outputs, before the output projection, are `value` [L, B, T, N, H] wherever `where` [L, B, T, N] is true.

    Axes B and T may have size 1: then the same holds for all sequences, or at all positions.
    """

    where: jax.Array
    value: jax.Array


class Intervention(NamedTuple):
    """`heads`: outputs of heads that are replaced. `key_gates`, `value_gates`: weights [L, B, J, W, K, g] of the tokens
    of each window, instead of those that the gates would give; B, J and g may be 1. `exact`: tokens [L, B, T] that the
    last query sees exactly, beside those that it sees anyway. Decoding from a cache takes `heads` alone."""

    heads: Heads | None = None
    key_gates: jax.Array | None = None
    value_gates: jax.Array | None = None
    exact: jax.Array | None = None


UNCHANGED = Intervention()
