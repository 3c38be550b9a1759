"""Windowed gating in plain jax.numpy for machines that fuse any element-wise expression: CPUs, and GPUs until a kernel
has proved itself there.

An offset of all windows is one strided slice, so that the forward pass is element-wise in [B, J, K, H], with neither
the array of all windows' tokens nor that of their gates. The backward pass is element-wise in the tokens: each collects
from the ⌈W/S⌉ windows that may hold it.
"""

import functools
import math
import operator

import jax
import jax.numpy as jnp

from phase_jax.axes import Entries, GateBias, GateLogits, Payload
from phase_jax.geometry import Windows

MOST = 16  # offsets: beyond them compilation takes its time
_MASKED = -1e30


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def windowed_gating(payload: Payload, logits: GateLogits, bias: GateBias | None, windows: Windows) -> Entries:
    """Entries [B, J, K, H]; see reference.py for what they are. Reverse-mode gradients only."""
    return _forward(payload, logits, bias, windows)[0]


def _forward(payload, logits, bias, windows):
    """Entries, and log-denominators of the gates [B, J, K, g]."""
    bias = _bias(bias, logits, windows)
    scores = [score + bias[i] for i, score in enumerate(_offsets(logits, windows))]
    before = -windows.origin  # offsets that the first windows may lack
    starts = windows.starts(logits.shape[1])[:, None, None]
    scores[:before] = [jnp.where(starts + i >= 0, score, _MASKED) for i, score in enumerate(scores[:before])]
    top = functools.reduce(jnp.maximum, scores)
    log_mass = top + jnp.log(functools.reduce(operator.add, [jnp.exp(score - top) for score in scores]))
    # Gates sum to 1 but for rounding. Dividing by their sum keeps XLA from computing the entries again wherever they
    # are used, as it does with what ends in an addition, and from storing each offset's exponential.
    gates = [jnp.exp(score - log_mass) for score in scores]
    total = functools.reduce(operator.add, map(operator.mul, gates, _offsets(payload, windows)))
    return (total / functools.reduce(operator.add, gates)).astype(payload.dtype), log_mass


def _forward_with_residuals(payload, logits, bias, windows):
    entries, log_mass = _forward(payload, logits, bias, windows)
    return entries, (payload, logits, bias, entries, log_mass)


def _backward(windows, residuals, entries_bar):
    """Gate α = exp(logit + bias − log-denominator); ∂payload = α · ∂entry, ∂logit = α · ∂entry · (payload − entry)."""
    payload, logits, bias, entries, log_mass = residuals
    length, parts = payload.shape[1], windows.streams
    count, chunks = windows.count(length), math.ceil((length - windows.origin) / windows.stride)
    payload_at, logits_at = (_by_chunk(x, windows, chunks) for x in (payload, logits))
    spare = [(0, parts * windows.stride - windows.width), (0, 0), (0, 0)]
    bias_at = jnp.pad(_bias(bias, logits, windows), spare, constant_values=_MASKED).reshape(
        parts, windows.stride, *logits.shape[3:]
    )
    exists = (windows.start(jnp.arange(chunks))[:, None] + jnp.arange(windows.stride) >= 0)[..., None, None]

    def of_window(x, part):
        """[B, J, …] -> [B, chunks, 1, …]: for each chunk the window of which it is that part, zero without one."""
        ends = [(0, 0), (part, max(0, chunks - part - count))] + [(0, 0)] * (x.ndim - 2)
        return jnp.pad(x, ends)[:, :chunks, None].astype(jnp.float32)

    payload_bars, logits_bars, bias_bars = [], [], []
    for part in range(parts):
        stream = min(part, payload.shape[2] - 1)
        window = jnp.arange(chunks)[:, None, None, None] - part
        held = exists & (window >= 0) & (window < count)
        scores = logits_at[:, :, :, stream] + bias_at[part] - of_window(log_mass, part)
        payload_bar = jnp.where(held, jnp.exp(scores), 0.0) * of_window(entries_bar, part)
        logits_bar = payload_bar * (payload_at[:, :, :, stream] - of_window(entries, part))
        if logits.shape[-1] == 1:
            logits_bar = logits_bar.sum(axis=-1, keepdims=True)
        payload_bars.append(payload_bar)
        logits_bars.append(logits_bar)
        bias_bars.append(logits_bar.sum(axis=(0, 1)))

    def by_token(of_parts, like):
        streams = jnp.stack(of_parts, axis=3) if like.shape[2] > 1 else sum(of_parts)[:, :, :, None]
        flat = streams.reshape(like.shape[0], -1, *like.shape[2:])
        return flat[:, -windows.origin :][:, :length].astype(like.dtype)

    bias_bar = None if bias is None else jnp.concatenate(bias_bars)[: windows.width].astype(bias.dtype)
    return by_token(payload_bars, payload), by_token(logits_bars, logits), bias_bar


windowed_gating.defvjp(_forward_with_residuals, _backward)


def _bias(bias, logits, windows):
    return jnp.zeros((windows.width, *logits.shape[3:])) if bias is None else bias.astype(jnp.float32)


def _offsets(streams: jax.Array, windows: Windows) -> list[jax.Array]:
    """[B, T, M, …] -> W of [B, J, …] in f32: what each offset of the windows reads."""
    count = windows.count(streams.shape[1])
    chunks = _by_chunk(streams, windows, count + windows.streams - 1)

    def offset(i):
        part, at = divmod(i, windows.stride)
        return chunks[:, part : part + count, at, min(part, streams.shape[2] - 1)]

    return [offset(i) for i in range(windows.width)]


def _by_chunk(streams: jax.Array, windows: Windows, chunks: int) -> jax.Array:
    """[B, T, M, …] -> [B, chunks, S, M, …] in f32: S tokens each, counted from the origin, zero where there is none."""
    length = chunks * windows.stride
    ends = (-windows.origin, max(0, length + windows.origin - streams.shape[1]))
    padded = jnp.pad(streams, [(0, 0), ends] + [(0, 0)] * (streams.ndim - 2))[:, :length]
    return padded.reshape(streams.shape[0], chunks, windows.stride, *streams.shape[2:]).astype(jnp.float32)
