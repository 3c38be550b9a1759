"""What attention looks at; the attention itself is `pallas_kernels.joint_attention`."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.online_softmax import masked_scores
from phase_jax.axes import Entries, ExactKV, Queries
from phase_jax.geometry import ExactBranch


def last_weights(
    q: Queries, entry_k: Entries | None, exact_k: ExactKV, exact: ExactBranch
) -> tuple[jax.Array, jax.Array]:
    """How the last query weighs entries [B, N, J] and exact tokens [B, N, T], f32; together they sum to 1.

    q [B, T, N, H], entry keys [B, J, K, H] (None in full attention), exact keys [B, T, K, H].
    """
    batch, length, heads, head_dim = q.shape
    t = np.int64(length - 1)
    seen = (np.arange(length) >= exact.first(t)) & (np.arange(length) <= t)
    keys, entries = exact_k, 0
    if entry_k is not None:
        keys, entries = jnp.concatenate([entry_k, exact_k], axis=1), entry_k.shape[1]
        seen = np.concatenate([exact.windows.visible(t, length), seen])
    q = q[:, -1].reshape(batch, exact_k.shape[2], -1, head_dim) * head_dim**-0.5
    weights = jax.nn.softmax(masked_scores("bkgh,bukh->bkgu", q, keys, seen)).reshape(batch, heads, -1)
    return weights[..., :entries], weights[..., entries:]
