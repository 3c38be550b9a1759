"""What attention looks at; the attention itself is `pallas_kernels.joint_attention`."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.online_softmax import masked_scores
from phase_jax.axes import Entries, ExactKV, KeysAndValues, Queries
from phase_jax.geometry import ExactBranch


def last_weights(
    q: Queries, entry_k: Entries | None, exact_k: ExactKV, exact: ExactBranch, also: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """How the last query weighs entries [B, N, J] and exact tokens [B, N, T], f32; together they sum to 1.

    q [B, ·, N, H], entry keys [B, J, K, H] (None in full attention), exact keys [B, T, K, H]. `also` [B, T] are exact
    tokens that it sees beside its own.
    """
    batch, _, heads, head_dim = q.shape
    length = exact_k.shape[1]
    own = np.arange(length) >= exact.first(np.int64(length - 1))
    seen = jnp.broadcast_to(own if also is None else own | also, (batch, length))
    keys, entries = exact_k, 0
    if entry_k is not None:
        keys, entries = jnp.concatenate([entry_k, exact_k], axis=1), entry_k.shape[1]
        seen = jnp.pad(seen, [(0, 0), (entries, 0)], constant_values=True)  # every entry has closed by then
    seen = seen[:, None, None]
    q = q[:, -1].reshape(batch, exact_k.shape[2], -1, head_dim) * head_dim**-0.5
    weights = jax.nn.softmax(masked_scores("bkgh,bukh->bkgu", q, keys, seen)).reshape(batch, heads, -1)
    return weights[..., :entries], weights[..., entries:]


def last_output(
    q: Queries, entries: KeysAndValues | None, exact_kv: KeysAndValues, exact: ExactBranch, also: jax.Array | None
) -> jax.Array:
    """What the last query gets, [B, N, H], of keys and values that `last_weights` weighs."""
    to_entries, to_exact = last_weights(q, entries and entries[0], exact_kv[0], exact, also)
    batch, heads, _ = to_exact.shape

    def mix(weights, values):
        weights = weights.reshape(batch, values.shape[2], -1, weights.shape[-1]).astype(values.dtype)
        return jnp.einsum("bkgu,bukh->bkgh", weights, values).reshape(batch, heads, -1)

    mixed = mix(to_exact, exact_kv[1])
    return mixed if entries is None else mixed + mix(to_entries, entries[1])
