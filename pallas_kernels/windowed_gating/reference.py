"""Windowed gating in plain jax.numpy: the specification of the kernel, and the path that CPUs run.

entry_j = Σ_i α_{j,i} ⊙ payload_{j,i}, α_j = softmax over the offsets i of window j (SPEC §2).
"""

import jax
import jax.numpy as jnp

from phase_jax.axes import Entries, GateBias, GateLogits, Payload
from phase_jax.geometry import Windows

_MASKED = -1e30


def by_window(streams: jax.Array, windows: Windows) -> jax.Array:
    """Arranges per-token streams by window: [B, T, M, …] -> [B, J, W, …].

    Offset i of window j reads stream min(⌊i/S⌋, M−1) of token start_j + i, so M is 1 or ⌈W/S⌉. Positions before the
    first token read as zero. One reshape and ⌈W/S⌉ slices; no gather.
    """
    width, stride, origin = windows.width, windows.stride, windows.origin
    batch, length, n_streams, *rest = streams.shape
    count, groups = windows.count(length), windows.streams
    chunks = count + groups - 1
    # Window j lies in chunks j … j + groups − 1 of S tokens each, counted from the origin.
    missing = max(0, chunks * stride - (length - origin))
    padded = jnp.pad(streams, [(0, 0), (-origin, missing)] + [(0, 0)] * (streams.ndim - 2))
    padded = padded[:, : chunks * stride].reshape(batch, chunks, stride, n_streams, *rest)
    parts = [padded[:, g : g + count, :, min(g, n_streams - 1)] for g in range(groups)]
    return jnp.concatenate(parts, axis=2)[:, :, :width]


def windowed_gates(logits: GateLogits, bias: GateBias | None, windows: Windows) -> jax.Array:
    """Gate weights α in f32, [B, J, W, K, g]: they sum to 1 over W and are exactly 0 before the first token."""
    scores = by_window(logits.astype(jnp.float32), windows)
    if bias is not None:
        scores = scores + bias.astype(jnp.float32)
    present = windows.starts(logits.shape[1])[:, None] + jnp.arange(windows.width) >= 0
    present = present[:, :, None, None]
    return jnp.where(present, jax.nn.softmax(jnp.where(present, scores, _MASKED), axis=2), 0.0)


def windowed_gating(payload: Payload, logits: GateLogits, bias: GateBias | None, windows: Windows) -> Entries:
    """Entries [B, J, K, H], in the payload's dtype.

    `payload` [B, T, M, K, H] and `logits` [B, T, M, K, g] with M = ⌈W/S⌉ streams (per-offset maps) or 1 (shared maps);
    g is 1 (one weight for a KV head) or H (one for each channel); `bias` [W, K, g] or None.
    """
    return weighted_sum(payload, windowed_gates(logits, bias, windows), windows)


def weighted_sum(payload: Payload, gates: jax.Array, windows: Windows) -> Entries:
    """Entries [B, J, K, H] of payload streams [B, T, M, K, H] under given gate weights [B, J, W, K, g]."""
    weighted = gates * by_window(payload, windows).astype(jnp.float32)
    return weighted.sum(axis=2).astype(payload.dtype)
