"""The unified compressor of SPEC §2 as pure functions: one branch (keys or values) of one layer.

A branch's parameters are a dict: `payload` C [maps, D, K, H]; with learned gates also `gate` Z [maps, D, K, g] and,
optionally, `bias` b [W, K, g]; with post-norm also `norm` [H]. The leading axis `maps` says how offsets share a map:
W of them (one for each offset, the paper's), M = ⌈W/S⌉ (one for each stride-long part of the window, DeepSeek's), or 1.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.windowed_gating import weighted_sum, windowed_gates, windowed_gating
from phase_jax.axes import Entries, GateLogits, Hidden, Payload
from phase_jax.geometry import Windows
from phase_jax.layers import rms_norm

_ABSENT = -1e30  # a gate logit that leaves weight exactly 0 beside any present token


def branch_shapes(
    windows: Windows,
    sharing: str,
    width: int,
    kv_heads: int,
    head_dim: int,
    gate_width: int | None,
    bias: bool,
    post_norm: bool,
) -> dict[str, tuple[int, ...]]:
    """Parameter shapes of one branch; `sharing` is offset, part or all (which offsets share a map), or payload (all
    share C, while each offset has its own Z)."""
    own, parts = windows.width, windows.streams
    payload_maps, gate_maps = {"offset": (own, own), "part": (parts, parts), "all": (1, 1), "payload": (1, own)}[
        sharing
    ]
    shapes = {"payload": (payload_maps, width, kv_heads, head_dim)}
    if gate_width is not None:
        shapes["gate"] = (gate_maps, width, kv_heads, gate_width)
        if bias:
            shapes["bias"] = (windows.width, kv_heads, gate_width)
    if post_norm:
        shapes["norm"] = (head_dim,)
    return shapes


def project_streams(hidden: Hidden, maps: jax.Array, windows: Windows) -> Payload:
    """Applies maps [maps, D, K, ·] to every token: [B, T, D] -> [B, T, M, K, ·].

    With a map for each offset, token t lies at offset (t − origin) mod S + m·S of the m-th window that holds it, so
    stream m takes that offset's map. The hidden states are only reshaped; no [B, J, W, D] copy is formed.
    """
    if maps.shape[0] != windows.width or windows.width == windows.streams:
        return jnp.einsum("btd,mdkh->btmkh", hidden, maps)
    batch, length, width = hidden.shape
    stride, before = windows.stride, -windows.origin
    after = -(before + length) % stride
    chunks = jnp.pad(hidden, [(0, 0), (before, after), (0, 0)]).reshape(batch, -1, stride, width)
    spare = windows.streams * stride - windows.width
    by_stream = jnp.pad(maps, [(0, spare), (0, 0), (0, 0), (0, 0)]).reshape(windows.streams, stride, *maps.shape[1:])
    streams = jnp.einsum("bcsd,msdkh->bcsmkh", chunks, by_stream)
    return streams.reshape(batch, -1, windows.streams, *maps.shape[2:])[:, before : before + length]


def compress(
    params: dict[str, jax.Array],
    hidden: Hidden,
    windows: Windows,
    norm_eps: float,
    present: jax.Array | None = None,
    gates: jax.Array | None = None,
) -> Entries:
    """Entries [B, J, K, H] of the windows that have closed, before key norm and RoPE.

    `present` [T] marks the tokens that exist, where the hidden states begin elsewhere than at position 0. `gates`
    [B, J, W, K, g] are weights to use instead of the learned ones.
    """
    payload = project_streams(hidden, params["payload"].astype(hidden.dtype), windows)
    if "norm" in params:
        payload = rms_norm(payload, params["norm"], norm_eps)
    if gates is not None:
        return weighted_sum(payload, gates, windows)
    logits = _gate_logits(params, hidden, windows)
    if present is not None:
        logits = jnp.where(present[:, None, None, None], logits, _ABSENT)
    return windowed_gating(payload, logits, params.get("bias"), windows)


def gate_weights(params: dict[str, jax.Array], hidden: Hidden, windows: Windows) -> jax.Array:
    """How the entries of `compress` weigh the tokens of their windows: f32 [B, J, W, K, g], summing to 1 over W."""
    return windowed_gates(_gate_logits(params, hidden, windows), params.get("bias"), windows)


def _gate_logits(params: dict[str, jax.Array], hidden: Hidden, windows: Windows) -> GateLogits:
    if "gate" in params:
        return project_streams(hidden, params["gate"].astype(hidden.dtype), windows)
    return jnp.zeros((*hidden.shape[:2], 1, params["payload"].shape[2], 1), jnp.float32)
