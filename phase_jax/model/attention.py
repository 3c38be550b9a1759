"""What attention looks at; the attention itself is `pallas_kernels.joint_attention`."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.online_softmax import masked_scores
from phase_jax.axes import Entries, ExactKV, KeysAndValues, Queries
from phase_jax.geometry import ExactBranch


def last_weights(
    q: Queries, entry_k: Entries | None, exact_k: ExactKV, exact: ExactBranch, also: jax.Array | bool = False
) -> tuple[jax.Array, jax.Array]:
    """How the last query weighs entries [B, N, J] and exact tokens [B, N, T], f32; together they sum to 1.

    q [B, T, N, H], entry keys [B, J, K, H] (None in full attention), exact keys [B, T, K, H]. `also` [B, T] are exact
    tokens that it sees beside its own.
    """
    batch, length, heads, head_dim = q.shape
    t = np.int64(length - 1)
    seen = jnp.broadcast_to((np.arange(length) >= exact.first(t)) | also, (batch, length))
    keys, entries = exact_k, 0
    if entry_k is not None:
        keys, entries = jnp.concatenate([entry_k, exact_k], axis=1), entry_k.shape[1]
        seen = jnp.pad(seen, [(0, 0), (entries, 0)], constant_values=True)  # every entry has closed by then
    seen = seen[:, None, None]
    q = q[:, -1].reshape(batch, exact_k.shape[2], -1, head_dim) * head_dim**-0.5
    weights = jax.nn.softmax(masked_scores("bkgh,bukh->bkgu", q, keys, seen)).reshape(batch, heads, -1)
    return weights[..., :entries], weights[..., entries:]


def last_output(
    q: Queries, entries: KeysAndValues, exact_kv: KeysAndValues, exact: ExactBranch, also: jax.Array
) -> jax.Array:
    """What the last query gets [B, N, H] where it sees the exact tokens `also` [B, T] beside its own."""
    to_entries, to_exact = last_weights(q, entries[0], exact_kv[0], exact, also)
    weights = jnp.concatenate([to_entries, to_exact], axis=-1)
    values = jnp.concatenate([entries[1], exact_kv[1]], axis=1)
    batch, heads, _ = weights.shape
    weights = weights.reshape(batch, values.shape[2], -1, weights.shape[-1])
    return jnp.einsum("bkgu,bukh->bkgh", weights.astype(values.dtype), values).reshape(batch, heads, -1)
