"""Windowed gating on Hopper GPUs (Mosaic GPU): a warpgroup walks along windows, a row of channels at a time.

Rows are read straight into registers; what neighbouring windows share comes from the caches. Nothing is reduced over
threads but the gradient of scalar gates.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from phase_jax.geometry import Windows

_MASKED = -1e30
_WARPGROUP = 128  # threads; a row is at most 16 bytes of bf16 for each
_WALK = 32  # chunks of S tokens that one warpgroup walks along in the backward pass, windows in the forward one
_UNROLLED = 8

_f32 = jnp.float32


def _channels_at_once(channels: int) -> int:
    """Channels of a row that one warpgroup takes: the most, up to four a thread, that divide them."""
    return next(n * _WARPGROUP for n in (4, 2, 1) if channels % (n * _WARPGROUP) == 0)


def _call(body: Callable, out_type, grid: tuple[int, ...], arguments, interpret: bool):
    """Runs `body` on a grid (row of channels, B, walk)."""
    if interpret:
        from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

        interpret = InterpretGPUParams()
    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        grid=grid,
        grid_names=("row", "batch", "walk"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )
    return kernel(*arguments)


def _load(ref, *index) -> jax.Array:
    """A row of channels, in f32."""
    return ref[index].astype(_f32)


def _each(n: int, body, carry):
    """A loop, written out where it is short."""
    if n > _UNROLLED:
        return jax.lax.fori_loop(0, n, body, carry)
    for i in range(n):
        carry = body(i, carry)
    return carry


def _flat(streams: jax.Array) -> jax.Array:
    return streams.reshape(*streams.shape[:2], -1)


def _place() -> tuple[jax.Array, jax.Array, jax.Array]:
    return tuple(jax.lax.axis_index(name) for name in ("row", "batch", "walk"))


def vector_forward(windows: Windows, payload, logits, bias, with_lse: bool, interpret: bool = False) -> list[jax.Array]:
    """Entries [B, J, K·H] and, on request, the softmax's log-denominators (f32) for the backward pass."""
    batch, length, streams, kv_heads, head_dim = payload.shape
    count, channels = windows.count(length), kv_heads * head_dim
    size = _channels_at_once(channels)

    def body(x, s, b, out, *lse):
        row, n, walk = _place()
        here = pl.ds(row * size, size)

        def one_window(j):
            def one_offset(i, carry):
                top, mass, total = carry
                t = windows.start(j) + i
                stream = i // windows.stride if streams > 1 else 0
                at = n, jnp.maximum(t, 0), pl.ds(stream * channels + row * size, size)
                # Before the first token: far below any score, so that its weight is 0 beside a token's.
                score = _load(s, *at) + _load(b, i, here) + jnp.where(t >= 0, 0.0, _MASKED)
                higher = jnp.maximum(top, score)
                kept, weight = jnp.exp(top - higher), jnp.exp(score - higher)
                return higher, mass * kept + weight, total * kept + weight * _load(x, *at)

            zero = jnp.zeros((size,), _f32)
            top, mass, total = _each(windows.width, one_offset, (zero + 2 * _MASKED, zero, zero))
            out[n, j, here] = (total / mass).astype(out.dtype)
            for ref in lse:
                ref[n, j, here] = top + jnp.log(mass)

        _walk(walk, count, one_window)

    shape = (batch, count, channels)
    out_type = [jax.ShapeDtypeStruct(shape, payload.dtype)] + [jax.ShapeDtypeStruct(shape, _f32)] * with_lse
    grid = (channels // size, batch, pl.cdiv(count, _WALK))
    return _call(body, out_type, grid, (_flat(payload), _flat(logits), bias.reshape(windows.width, -1)), interpret)


def _walk(walk: jax.Array, count: int, body: Callable) -> None:
    """Runs `body(n)` for the numbers below `count` that belong to this walk."""

    def step(k, _):
        @pl.when(walk * _WALK + k < count)
        def _():
            body(walk * _WALK + k)

    jax.lax.fori_loop(0, _WALK, step, None)


def _chunks(windows: Windows, length: int) -> int:
    """Chunks of S tokens, counted from the origin, that all tokens lie in."""
    return pl.cdiv(length - windows.origin, windows.stride)


def vector_backward(windows: Windows, payload, logits, bias, lse, out, out_bar, interpret: bool = False):
    """Gradients of payload, logits and bias, in their shapes and dtypes but for the bias's, which is f32."""
    batch, length, streams, kv_heads, head_dim = payload.shape
    count, channels, stride = windows.count(length), kv_heads * head_dim, windows.stride
    size, parts = _channels_at_once(channels), windows.streams
    walks = pl.cdiv(_chunks(windows, length), _WALK)

    def body(x, s, b, lse, out, out_bar, x_bar, s_bar, bias_bar):
        row, n, walk = _place()
        here = pl.ds(row * size, size)

        def one_phase(r):
            def one_chunk(k, bias_bars):
                chunk = walk * _WALK + k
                t = windows.start(chunk) + r
                there = (t >= 0) & (t < length)
                at = n, jnp.clip(t, 0, length - 1)
                lanes = [pl.ds(m * channels + row * size, size) for m in range(streams)]
                value, logit = ([_load(ref, *at, lane) for lane in lanes] for ref in (x, s))
                zero = jnp.zeros((size,), _f32)
                value_bar, logit_bar = [zero] * streams, [zero] * streams
                for part in range(parts):
                    i, j, m = part * stride + r, chunk - part, part if streams > 1 else 0
                    exists = jnp.where(there & (i < windows.width) & (j >= 0) & (j < count), 1.0, 0.0)
                    own = n, jnp.clip(j, 0, count - 1), here
                    # Never above 0 but for rounding; where the window is another one, anything, and weighed by 0.
                    weight = (
                        jnp.exp(
                            jnp.minimum(
                                logit[m] + _load(b, jnp.minimum(i, windows.width - 1), here) - _load(lse, *own), 0.0
                            )
                        )
                        * exists
                    )
                    through_value = weight * _load(out_bar, *own)
                    through_logit = through_value * (value[m] - _load(out, *own))
                    value_bar[m] += through_value
                    logit_bar[m] += through_logit
                    bias_bars = (*bias_bars[:part], bias_bars[part] + through_logit, *bias_bars[part + 1 :])

                @pl.when(there)
                def _():
                    for m, lane in enumerate(lanes):
                        x_bar[*at, lane] = value_bar[m].astype(x_bar.dtype)
                        s_bar[*at, lane] = logit_bar[m].astype(s_bar.dtype)

                return bias_bars

            bias_bars = jax.lax.fori_loop(0, _WALK, one_chunk, (jnp.zeros((size,), _f32),) * parts)
            for part, bar in enumerate(bias_bars):

                @pl.when(part * stride + r < windows.width)
                def _(part=part, bar=bar):
                    bias_bar[n * walks + walk, part * stride + r, here] = bar

        jax.lax.fori_loop(0, stride, lambda r, _: one_phase(r), None)

    arguments = [_flat(payload), _flat(logits), bias.reshape(windows.width, -1)]
    arguments += [a.reshape(batch, count, channels) for a in (lse, out, out_bar)]
    out_type = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments[:2]]
    out_type.append(jax.ShapeDtypeStruct((batch * walks, windows.width, channels), _f32))
    x_bar, s_bar, bias_bar = _call(body, out_type, (channels // size, batch, walks), arguments, interpret)
    return x_bar.reshape(payload.shape), s_bar.reshape(logits.shape), bias_bar.sum(axis=0).reshape(bias.shape)


def scalar_forward(windows: Windows, payload, weights, interpret: bool = False) -> jax.Array:
    """Entries [B, J, K·H] under weights [B, K, ⌈W/S⌉, T] in f32."""
    batch, length, streams, kv_heads, head_dim = payload.shape
    count = windows.count(length)

    def body(x, w, out):
        head, n, walk = _place()

        def one_window(j):
            def one_offset(i, total):
                t, part = windows.start(j) + i, i // windows.stride
                at = jnp.maximum(t, 0)
                weight = jnp.where(t >= 0, w[n, head, part, at], 0.0)
                stream = part if streams > 1 else 0
                return total + weight * _load(x, n, at, pl.ds((stream * kv_heads + head) * head_dim, head_dim))

            total = _each(windows.width, one_offset, jnp.zeros((head_dim,), _f32))
            out[n, j, pl.ds(head * head_dim, head_dim)] = total.astype(out.dtype)

        _walk(walk, count, one_window)

    out_type = jax.ShapeDtypeStruct((batch, count, kv_heads * head_dim), payload.dtype)
    return _call(body, out_type, (kv_heads, batch, pl.cdiv(count, _WALK)), (_flat(payload), weights), interpret)


def scalar_backward(
    windows: Windows, payload, weights, out_bar, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Gradients of payload and weights, in their shapes and dtypes."""
    batch, length, streams, kv_heads, head_dim = payload.shape
    count, parts = windows.count(length), windows.streams

    def body(x, w, out_bar, x_bar, w_bar):
        head, n, walk = _place()

        def one_token(t):
            chunk = (t - windows.origin) // windows.stride
            lanes = [pl.ds((m * kv_heads + head) * head_dim, head_dim) for m in range(streams)]
            value = [_load(x, n, t, lane) for lane in lanes]
            value_bar = [jnp.zeros((head_dim,), _f32)] * streams
            for part in range(parts):
                j, m = chunk - part, part if streams > 1 else 0
                # Where no window holds the token as this part of it, the weight is 0 already.
                bar = _load(out_bar, n, jnp.clip(j, 0, count - 1), pl.ds(head * head_dim, head_dim))
                exists = jnp.where((j >= 0) & (j < count), 1.0, 0.0)
                value_bar[m] += w[n, head, part, t] * bar
                w_bar[n, head, part, t] = (bar * value[m]).sum() * exists
            for m, lane in enumerate(lanes):
                x_bar[n, t, lane] = value_bar[m].astype(x_bar.dtype)

        _walk(walk, length, one_token)

    arguments = (_flat(payload), weights, out_bar.reshape(batch, count, -1))
    out_type = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arguments[:2]]
    x_bar, w_bar = _call(body, out_type, (kv_heads, batch, pl.cdiv(length, _WALK)), arguments, interpret)
    return x_bar.reshape(payload.shape), w_bar
