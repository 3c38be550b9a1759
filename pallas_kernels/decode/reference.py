"""Decoding in plain jax.numpy: the specification of the kernel, and the path that CPUs run."""

import jax
import jax.numpy as jnp

from pallas_kernels.online_softmax import Softmax
from phase_jax.axes import KeysAndValues


def decode_attention(
    q: jax.Array,
    far: KeysAndValues,
    near: KeysAndValues | None,
    count: jax.Array,
    first: jax.Array | None,
    sink: jax.Array | None,
) -> jax.Array:
    """Scaled queries [B, K, G, H] over the first `count` [B] of `far` and, of `near`, those from `first` [B] on."""

    state = exact_tokens(q, near, first, sink)
    state = _absorb(state, q, far, jnp.arange(far[0].shape[1]) < count[:, None])
    return state.result()[:, :, :, 0].astype(far[1].dtype)


def exact_tokens(q: jax.Array, near: KeysAndValues | None, first: jax.Array | None, sink: jax.Array | None) -> Softmax:
    """The softmax of the sink and the exact tokens alone, of queries [B, K, G, 1, H]."""
    state = Softmax.of_nothing((*q.shape[:3], 1, q.shape[3]), sink)
    if near is None:
        return state
    return _absorb(state, q, near, jnp.arange(near[0].shape[1]) >= first[:, None])


def _absorb(state: Softmax, q: jax.Array, pair: KeysAndValues, seen: jax.Array) -> Softmax:
    keys, values = (jnp.swapaxes(x, 1, 2) for x in pair)
    return state.absorb(q[:, :, :, None], keys, values, seen[:, None, None, None])
