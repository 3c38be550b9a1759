"""Windowed gating: the Pallas form against the ways to write it in plain JAX, of which "by offset" alone has a
backward pass of its own.

Streams come as a projection leaves them, [B, T, M·K·H], so that what a form does to their layout counts as its cost.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from experiments.kernel_cases import Case, normal
from pallas_kernels.windowed_gating import by_offset, kind, reference, windowed_gating
from phase_jax.geometry import Windows

_MASKED = -1e30


def gather(payload, logits, bias, windows: Windows):
    """Windows by indices [J, W]."""
    at = windows.starts(payload.shape[1])[:, None] + jnp.arange(windows.width)
    stream = jnp.minimum(jnp.arange(windows.width) // windows.stride, payload.shape[2] - 1)

    def by_window(x):
        return x[:, jnp.maximum(at, 0), jnp.broadcast_to(stream, at.shape)].astype(jnp.float32)

    scores = jnp.where(at[..., None, None] >= 0, by_window(logits) + bias, _MASKED)
    gates = jax.nn.softmax(scores, axis=2)
    return (gates * by_window(payload)).sum(axis=2).astype(payload.dtype)


def shifted_slices(payload, logits, bias, windows: Windows):
    """Every S-th token from each offset on: one strided slice an offset, and a softmax over the list of them."""
    count, behind, stride = windows.count(payload.shape[1]), -windows.origin, windows.stride

    def offset(x, i):
        x = jnp.pad(x[:, :, min(i // stride, x.shape[2] - 1)], [(0, 0), (behind, 0), (0, 0), (0, 0)])
        return jax.lax.slice_in_dim(x, i, i + (count - 1) * stride + 1, stride, axis=1).astype(jnp.float32)

    first = windows.starts(payload.shape[1])[:, None, None]
    scores = [jnp.where(first + i >= 0, offset(logits, i) + bias[i], _MASKED) for i in range(windows.width)]
    top = functools.reduce(jnp.maximum, scores)
    weights = [jnp.exp(score - top) for score in scores]
    total = sum(weight * offset(payload, i) for i, weight in enumerate(weights))
    return (total / sum(weights)).astype(payload.dtype)


def chunk_view(payload, logits, bias, windows: Windows):
    """Chunks of S tokens: a softmax within those of each part of a window, then one over the parts."""
    length, stride, behind = payload.shape[1], windows.stride, -windows.origin
    parts, count = windows.streams, windows.count(length)
    chunks = count + parts - 1
    missing = max(0, chunks * stride - behind - length)

    def by_chunk(x, part):
        x = jnp.pad(x[:, :, min(part, x.shape[2] - 1)], [(0, 0), (behind, missing), (0, 0), (0, 0)])
        x = x[:, : chunks * stride].reshape(x.shape[0], chunks, stride, *x.shape[2:])
        return x[:, part : part + count].astype(jnp.float32)

    bias = jnp.pad(bias, [(0, parts * stride - windows.width), (0, 0), (0, 0)], constant_values=_MASKED)
    at = windows.starts(length)[:, None] + jnp.arange(parts * stride)
    tops, masses, totals = [], [], []
    for part in range(parts):
        own = slice(part * stride, (part + 1) * stride)
        score = jnp.where(at[:, own, None, None] >= 0, by_chunk(logits, part) + bias[own], _MASKED)
        tops.append(score.max(axis=2))
        weight = jnp.exp(score - tops[-1][:, :, None])
        masses.append(weight.sum(axis=2))
        totals.append((weight * by_chunk(payload, part)).sum(axis=2))
    top = functools.reduce(jnp.maximum, tops)
    scales = [jnp.exp(t - top) for t in tops]
    mass = sum(s * m for s, m in zip(scales, masses, strict=True))
    total = sum(s * t for s, t in zip(scales, totals, strict=True))
    return (total / mass).astype(payload.dtype)


def _case(
    width: int, stride: int, streams: int, gate: str, length: int, kv_heads: int, head_dim: int, dtype: str
) -> Case:
    windows = Windows(width, stride)
    gates = head_dim if gate == "vector" else 1
    item = jnp.dtype(dtype).itemsize
    shape = (1, length, streams, kv_heads)
    # KERNELS' least: streams in, entries out; backward both in and their gradients out, entries, cotangents and
    # f32 log-denominators in.
    tokens, entries = length * kv_heads, length * kv_heads / stride
    least = tokens * streams * (head_dim + gates) * item + entries * head_dim * item
    least_grad = least + 2 * tokens * streams * (head_dim + gates) * item + entries * (2 * head_dim * item + 4 * gates)

    def arguments(key):
        payload, logits, bias = normal(
            key,
            (1, length, streams * kv_heads * head_dim),
            (1, length, streams * kv_heads * gates),
            (width, kv_heads, gates),
        )
        return payload.astype(dtype), logits.astype(dtype), bias

    def on_streams(function: Callable):
        def run(payload, logits, bias):
            out = function(payload.reshape(*shape, head_dim), logits.reshape(*shape, gates), bias, windows)
            return out.reshape(1, -1, kv_heads * head_dim)

        return run

    forms = {"gather": gather, "shifted slices": shifted_slices, "chunk view": chunk_view}
    return Case(
        kernel="windowed_gating",
        name=f"{gate} {width}/{stride}, streams {streams}, K·H {kv_heads}·{head_dim}, T {length}, {dtype}",
        kind=kind(jax.ShapeDtypeStruct((*shape, gates), dtype), windows),
        dtype=dtype,
        arguments=arguments,
        pallas=on_streams(functools.partial(windowed_gating, implementation="pallas")),
        xla={
            "stacked reshapes": on_streams(reference.windowed_gating),
            "by offset": on_streams(by_offset.windowed_gating),
            **{name: on_streams(form) for name, form in forms.items()},
        },
        gradients=(0, 1, 2),
        bytes_least=least,
        bytes_least_grad=least_grad,
    )


CASES = tuple(
    _case(*geometry, gate, 8192, 8, 128, dtype)
    for dtype in ("bfloat16", "float32")
    for gate, geometry in (
        ("vector", (8, 4, 1)),
        ("vector", (8, 4, 2)),
        ("vector", (16, 16, 1)),
        ("scalar", (8, 4, 1)),
        ("scalar", (8, 4, 2)),
        ("scalar", (8, 8, 1)),
    )
)
