"""Windowed gating on TPUs (Mosaic). What is moved are the streams, once, and what neighbouring blocks share.

A block is `entries` windows, or their S tokens each, by `lanes` channels. Vector gates take their softmax here, with
every S-th row loaded from f32 scratch; scalar gates come as weights, 1/H of the numbers, and each block is one matrix
product with the band of windows over tokens. The grid ends with what a block of the output is accumulated over.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from phase_jax.geometry import Windows

_MASKED = -1e30
_ROWS = 16  # a tile of bf16 has as many rows, two of f32
_LANES = 128
_VMEM = 11 * 2**20  # for our blocks, of the 16 MiB that the compiler grants on v5e
_BAND = 2**17  # elements of the band of windows over tokens, at most

_f32 = jnp.float32
_product = functools.partial(jax.lax.dot_general, precision=jax.lax.Precision.HIGHEST, preferred_element_type=_f32)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a call is cut into blocks; `streams` of the payload, `lanes` of the channels K·H."""

    windows: Windows
    batch: int
    length: int
    streams: int
    channels: int
    lanes: int
    entries: int

    @property
    def tokens(self) -> int:
        return self.entries * self.windows.stride

    @property
    def count(self) -> int:
        return self.windows.count(self.length)

    @property
    def lane_blocks(self) -> int:
        return self.channels // self.lanes

    def offsets(self, stream: int) -> range:
        """The offsets that read this stream: all of a shared one, one stride of a window else."""
        width, stride = self.windows.width, self.windows.stride
        return range(width) if self.streams == 1 else range(stream * stride, min((stream + 1) * stride, width))

    def token_halo(self, stream: int) -> tuple[int, int]:
        """Tokens of this stream (before, after) a block's own that its windows read."""
        offsets, origin, stride = self.offsets(stream), self.windows.origin, self.windows.stride
        return max(0, -origin - offsets[0]), max(0, offsets[-1] + 1 - stride + origin)

    @property
    def entry_halo(self) -> tuple[int, int]:
        """Windows (before, after) a block's own that its tokens lie in."""
        width, stride, behind = self.windows.width, self.windows.stride, -self.windows.origin
        return -((behind - width) // stride + 1), (stride - 1 + behind) // stride


def plan(windows: Windows, payload: jax.Array, scalar: bool) -> Plan:
    """The largest blocks that fit. Raises NotImplementedError, with the reason, where none does."""
    batch, length, streams, kv_heads, head_dim = payload.shape
    channels = kv_heads * head_dim
    lanes = head_dim if scalar else channels if channels % _LANES else _LANES
    sketch = Plan(windows, batch, length, streams, channels, lanes, 0)
    halos = [h for m in range(streams) for h in sketch.token_halo(m)]
    sizes = {_tile(h, _ROWS) for h in halos} | ({_LANES, *(_tile(h, _LANES) for h in halos)} if scalar else set())
    divisors = {_tile(h, _ROWS) for h in sketch.entry_halo} - {0}

    def fits(entries):
        return all(entries * windows.stride % n == 0 for n in sizes - {0}) and all(entries % n == 0 for n in divisors)

    step = next(n for n in itertools.count(_ROWS, _ROWS) if fits(n))
    item = payload.dtype.itemsize
    # Bytes of a token of one stream by one lane: blocks are doubled, to move one while another is worked on. The
    # backward pass has gradients beside them; vector gates have logits beside payloads and f32 copies of all.
    if scalar:
        token = 4 * item + 3 * 4
        most = min(_VMEM // (token * streams * lanes * windows.stride), int((_BAND / windows.stride) ** 0.5))
    else:
        token = max(8 * item + 4 * 4, (4 * item + 2 * 4) * streams)
        entry = 4 * item + 2 * 4 + 3 * 4
        most = _VMEM // ((token * windows.stride + entry) * max(lanes, _LANES))
    entries = max(most // step, 1) * step
    if entries > most * 2:
        raise NotImplementedError(f"a block of {entries} windows of stride {windows.stride} exceeds the chip's VMEM")
    return dataclasses.replace(sketch, entries=min(entries, _up(sketch.count, step)))


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


def _tile(halo: int, least: int) -> int:
    """Rows of the block that holds a halo: a power of two, so that blocks of few windows are multiples of it."""
    return max(least, 1 << (halo - 1).bit_length()) if halo else 0


def _strip(rows: int, total: int, halo: tuple[int, int], tile: int, block) -> list[pl.BlockSpec]:
    """Blocks that lie one below the other, (before,) `rows` (, after), of an axis of `total` rows.

    `block(size, index)` makes the BlockSpec of `size` rows whose position along the axis is `index(c)`, c the grid's
    third number. A halo that reaches beyond the axis is some other block of it; whoever reads it masks it.
    """

    def spec(size, index):
        last = -(-total // size) - 1
        return block(size, lambda c: jnp.clip(index(c), 0, last))

    before, after = (_tile(h, tile) for h in halo)
    specs = [spec(rows, lambda c: c)]
    if before:
        specs.insert(0, spec(before, lambda c: c * (rows // before) - 1))
    if after:
        specs.append(spec(after, lambda c: (c + 1) * (rows // after)))
    return specs


def _rows_by_lanes(lanes: int, lane_block):
    """For `_strip`: blocks of an array [B, rows, channels] under the grid (lane block, B, block of rows, …)."""

    def block(size, index):
        return pl.BlockSpec((None, size, lanes), lambda lane, b, c, *m: (b, index(c), lane_block(lane, *m)))

    return block


def _widen(blocks, scratch) -> None:
    """Blocks one below the other into f32 scratch: Mosaic loads every S-th row of 32-bit memory only."""
    at = 0
    for block in blocks:
        scratch[pl.ds(at, block.shape[0]), :] = block[...].astype(_f32)
        at += block.shape[0]


def _each(n: int, body, carry=None):
    return jax.lax.fori_loop(0, n, body, carry, unroll=n <= 16)


def _numbers(first, shape: tuple[int, int], axis: int) -> jax.Array:
    return first + jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _call(kernel, grid, in_specs, outputs, scratch, carried: int, interpret: bool):
    """pallas_call; `carried` grid axes at the end run in order, since blocks are kept or accumulated over them."""
    semantics = ("parallel",) * (len(grid) - carried) + ("arbitrary",) * carried
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_specs=[spec for spec, _ in outputs],
        out_shape=[shape for _, shape in outputs],
        scratch_shapes=[pltpu.VMEM(shape, _f32) for shape in scratch],
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
        interpret=interpret,
    )


# Vector gates: a weight for every channel.


def _vector_forward_kernel(plan: Plan, payload, logits, bias, *refs):
    """Entries and, where there is room for it, the logarithm of the softmax's denominator."""
    outputs, x, s = refs[: -2 * plan.streams], refs[-2 * plan.streams : -plan.streams], refs[-plan.streams :]
    for blocks, scratch in zip([*payload, *logits], [*x, *s], strict=True):
        _widen(blocks, scratch)
    stride, behind = plan.windows.stride, -plan.windows.origin
    j = _numbers(pl.program_id(2) * plan.entries, (plan.entries, plan.lanes), 0)

    def rows(m, i):
        return pl.ds(_tile(plan.token_halo(m)[0], _ROWS) + i - behind, plan.entries, stride=stride), slice(None)

    def score(m, i):
        value = s[m][rows(m, i)] + bias[pl.ds(i, 1), :]
        return jnp.where(j * stride >= behind - i, value, _MASKED) if behind else value

    def over_offsets(body, carry):
        for m in range(plan.streams):
            offsets = plan.offsets(m)
            carry = _each(len(offsets), lambda r, carry, m=m, o=offsets: body(m, o[0] + r, carry), carry)
        return carry

    top = over_offsets(lambda m, i, top: jnp.maximum(top, score(m, i)), jnp.full(j.shape, _MASKED, _f32))

    def add(m, i, carry):
        mass, total = carry
        weight = jnp.exp(score(m, i) - top)
        value = x[m][rows(m, i)]
        if behind:
            value = jnp.where(weight > 0, value, 0.0)
        return mass + weight, total + weight * value

    mass, total = over_offsets(add, (jnp.zeros_like(top), jnp.zeros_like(top)))
    outputs[0][...] = (total / mass).astype(outputs[0].dtype)
    for lse in outputs[1:]:
        lse[...] = top + jnp.log(mass)


def vector_forward(windows: Windows, payload, logits, bias, with_lse: bool, interpret: bool = False) -> list[jax.Array]:
    """Entries [B, J, K·H] and, on request, the softmax's log-denominators (f32) for the backward pass."""
    p = plan(windows, payload, scalar=False)
    strips = [
        _strip(
            p.tokens,
            p.length,
            p.token_halo(m),
            _ROWS,
            _rows_by_lanes(p.lanes, lambda lane, m=m: m * p.lane_blocks + lane),
        )
        for m in range(p.streams)
    ]
    (entry,) = _strip(p.entries, p.count, (0, 0), _ROWS, _rows_by_lanes(p.lanes, lambda lane: lane))
    shape = (p.batch, p.count, p.channels)
    outputs = [(entry, jax.ShapeDtypeStruct(shape, payload.dtype))]
    if with_lse:
        outputs.append((entry, jax.ShapeDtypeStruct(shape, _f32)))
    heights = [p.tokens + sum(_tile(h, _ROWS) for h in p.token_halo(m)) for m in range(p.streams)]
    payload, logits, bias = _flat(payload), _flat(logits), bias.reshape(windows.width, -1)
    run = _call(
        functools.partial(_vector_forward_kernel, p),
        (p.lane_blocks, p.batch, pl.cdiv(p.count, p.entries)),
        [strips, strips, pl.BlockSpec((windows.width, p.lanes), lambda lane, b, c: (0, lane))],
        outputs,
        [(height, p.lanes) for height in heights * 2],
        0,
        interpret,
    )
    return run([[payload] * len(s) for s in strips], [[logits] * len(s) for s in strips], bias)


def _vector_backward_kernel(
    plan: Plan, x, s, bias, lse, out, out_bar, x_bar, s_bar, bias_bar, x32, s32, xb32, sb32, lse32, out32, ob32
):
    """Gradients of a block of tokens of one stream; that of the bias is accumulated over the grid."""
    b, c, stream = (pl.program_id(axis) for axis in (1, 2, 3))
    windows, stride, behind = plan.windows, plan.windows.stride, -plan.windows.origin

    @pl.when((b == 0) & (c == 0) & (stream == 0))
    def _():
        bias_bar[...] = jnp.zeros_like(bias_bar)

    for blocks, scratch in (([x], x32), ([s], s32), (lse, lse32), (out, out32), (out_bar, ob32)):
        _widen(blocks, scratch)
    parts = range(windows.streams) if plan.streams == 1 else [stream]

    def one_phase(r, _):
        rows = pl.ds(r, plan.entries, stride=stride), slice(None)
        # Not // and %: nothing is negative, and their rounding takes operations that need a TPU at hand to compile.
        chunk, phase = jax.lax.div(r + behind, stride), jax.lax.rem(r + behind, stride)
        value, logit = x32[rows], s32[rows]
        value_bar = logit_bar = jnp.zeros_like(value)
        for part in parts:
            i = phase + part * stride
            shift = chunk - part
            own = pl.ds(_tile(plan.entry_halo[0], _ROWS) + shift, plan.entries), slice(None)
            j = _numbers(c * plan.entries + shift, value.shape, 0)
            exists = (j >= 0) & (j < plan.count) & (i < windows.width)
            offset = pl.ds(jnp.minimum(i, windows.width - 1), 1), slice(None)
            weight = jnp.exp(logit + bias[offset] - lse32[own])
            through_value = jnp.where(exists, weight * ob32[own], 0.0)
            through_logit = jnp.where(exists, through_value * (value - out32[own]), 0.0)
            value_bar += through_value
            logit_bar += through_logit
            bias_bar[offset] += through_logit.sum(axis=0, keepdims=True)
        xb32[rows], sb32[rows] = value_bar, logit_bar

    _each(stride, one_phase)
    x_bar[...] = xb32[...].astype(x_bar.dtype)
    s_bar[...] = sb32[...].astype(s_bar.dtype)


def vector_backward(windows: Windows, payload, logits, bias, lse, out, out_bar, interpret: bool = False):
    """Gradients of payload, logits and bias, in their shapes and dtypes but for the bias's, which is f32."""
    p = plan(windows, payload, scalar=False)
    of_stream = _rows_by_lanes(p.lanes, lambda lane, m: m * p.lane_blocks + lane)
    (token,) = _strip(p.tokens, p.length, (0, 0), _ROWS, of_stream)
    entry = _strip(p.entries, p.count, p.entry_halo, _ROWS, _rows_by_lanes(p.lanes, lambda lane, m: lane))
    offsets = pl.BlockSpec((windows.width, p.lanes), lambda lane, b, c, m: (0, lane))
    flat = jax.ShapeDtypeStruct((p.batch, p.length, p.streams * p.channels), payload.dtype)
    heights = [p.tokens] * 4 + [p.entries + sum(_tile(h, _ROWS) for h in p.entry_halo)] * 3
    run = _call(
        functools.partial(_vector_backward_kernel, p),
        (p.lane_blocks, p.batch, pl.cdiv(p.length, p.tokens), p.streams),
        [token, token, offsets, entry, entry, entry],
        [
            (token, flat),
            (token, flat.update(dtype=logits.dtype)),
            (offsets, jax.ShapeDtypeStruct((windows.width, p.channels), _f32)),
        ],
        [(height, p.lanes) for height in heights],
        3,
        interpret,
    )
    strips = ([x.reshape(p.batch, p.count, -1)] * len(entry) for x in (lse, out, out_bar))
    x_bar, s_bar, bias_bar = run(_flat(payload), _flat(logits), bias.reshape(windows.width, -1), *strips)
    return x_bar.reshape(payload.shape), s_bar.reshape(logits.shape), bias_bar.reshape(bias.shape)


def _flat(streams: jax.Array) -> jax.Array:
    """[B, T, M, K, ·] -> [B, T, M·K·]: how a projection leaves it."""
    return streams.reshape(*streams.shape[:2], -1)


# Scalar gates: weights [B, K, ⌈W/S⌉, T], that of token t in the m-th window that holds it (vjp.py makes them).


def _token_masked(value: jax.Array, first, length: int, axis: int) -> jax.Array:
    """Zero where the token's position, counted along `axis` from `first`, is none of 0 … length − 1."""
    t = _numbers(first, value.shape, axis)
    return jnp.where((t >= 0) & (t < length), value, jnp.zeros((), value.dtype))


def _in_window(plan: Plan, first_entry, entries: int, first_token, tokens: int, part) -> jax.Array:
    """[entries, tokens]: whether window j holds token t in its part of S offsets, counted from the block's own."""
    j, t = (_numbers(first, (entries, tokens), axis) for axis, first in enumerate((first_entry, first_token)))
    offset = t - plan.windows.origin - (j + part) * plan.windows.stride
    return (offset >= 0) & (offset < plan.windows.stride)


def _sides(rows: int, halo: tuple[int, int], tile: int) -> list[tuple[int, int]]:
    """(first, count) of the rows of each block of a `_strip`, counted from the middle one's first."""
    before, after = (_tile(h, tile) for h in halo)
    return [(first, n) for first, n in ((-before, before), (0, rows), (rows, after)) if n]


def _scalar_forward_kernel(plan: Plan, payload, weights, out):
    """Entries: over streams and blocks, the band of weights [entries, tokens] times the payload [tokens, lanes]."""
    here = pl.program_id(2) * plan.tokens
    total = jnp.zeros(out.shape, _f32)
    for side, (first, n) in enumerate(_sides(plan.tokens, _scalar_halo(plan), _ROWS)):
        weight = weights[side][...]
        weight = _token_masked(weight[:, -n:] if first < 0 else weight[:, :n], here + first, plan.length, 1)
        bands = [
            jnp.where(_in_window(plan, 0, plan.entries, first, n, part), weight[part : part + 1], 0.0)
            for part in range(plan.windows.streams)
        ]
        for stream, band in zip(payload, [sum(bands)] if plan.streams == 1 else bands, strict=True):
            value = _token_masked(stream[side][...].astype(_f32), here + first, plan.length, 0)
            total += _product(band, value, (((1,), (0,)), ((), ())))
    out[...] = total.astype(out.dtype)


def _scalar_halo(plan: Plan) -> tuple[int, int]:
    before, after = zip(*(plan.token_halo(m) for m in range(plan.streams)), strict=True)
    return max(before), max(after)


def _weight_block(parts: int):
    """For `_strip`: blocks of the weights."""

    def block(size, index):
        return pl.BlockSpec((None, None, parts, size), lambda k, b, c, *m: (b, k, 0, index(c)))

    return block


def scalar_forward(windows: Windows, payload, weights, interpret: bool = False) -> jax.Array:
    """Entries [B, J, K·H] under weights [B, K, ⌈W/S⌉, T] in f32."""
    p = plan(windows, payload, scalar=True)
    halo = _scalar_halo(p)
    strips = [
        _strip(p.tokens, p.length, halo, _ROWS, _rows_by_lanes(p.lanes, lambda k, m=m: m * p.lane_blocks + k))
        for m in range(p.streams)
    ]
    weight = _strip(p.tokens, p.length, halo, _LANES, _weight_block(windows.streams))
    (entry,) = _strip(p.entries, p.count, (0, 0), _ROWS, _rows_by_lanes(p.lanes, lambda k: k))
    shape = jax.ShapeDtypeStruct((p.batch, p.count, p.channels), payload.dtype)
    grid = (p.lane_blocks, p.batch, pl.cdiv(p.count, p.entries))
    kernel = functools.partial(_scalar_forward_kernel, p)
    run = _call(kernel, grid, [strips, weight], [(entry, shape)], [], 0, interpret)
    return run([[_flat(payload)] * len(s) for s in strips], [weights] * len(weight))[0]


def _scalar_backward_kernel(plan: Plan, x, weight, out_bar, x_bar, weight_bar):
    """Gradients of a block of tokens of one stream: products with the band of the windows that they lie in."""
    c, stream = pl.program_id(2), pl.program_id(3)
    parts = range(plan.windows.streams) if plan.streams == 1 else [stream]
    value = x[...].astype(_f32)
    value_bar = jnp.zeros_like(value)
    weight_bars = [jnp.zeros((1, plan.tokens), _f32) for _ in parts]
    for (first, n), block in zip(_sides(plan.entries, plan.entry_halo, _ROWS), out_bar, strict=True):
        j = _numbers(c * plan.entries + first, block.shape, 0)
        ours = jnp.where((j >= 0) & (j < plan.count), block[...].astype(_f32), 0.0)
        product_bar = _product(ours, value, (((1,), (1,)), ((), ())))
        inside = [_in_window(plan, first, n, 0, plan.tokens, part) for part in parts]
        band = sum(jnp.where(i, weight[pl.ds(part, 1), :], 0.0) for i, part in zip(inside, parts, strict=True))
        value_bar += _product(band, ours, (((0,), (0,)), ((), ())))
        weight_bars = [
            bar + jnp.where(i, product_bar, 0.0).sum(axis=0, keepdims=True)
            for bar, i in zip(weight_bars, inside, strict=True)
        ]
    x_bar[...] = value_bar.astype(x_bar.dtype)
    for part, bar in zip(parts, weight_bars, strict=True):
        weight_bar[pl.ds(part, 1), :] = bar


def scalar_backward(
    windows: Windows, payload, weights, out_bar, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Gradients of payload and weights, in their shapes and dtypes."""
    p = plan(windows, payload, scalar=True)
    (token,) = _strip(p.tokens, p.length, (0, 0), _ROWS, _rows_by_lanes(p.lanes, lambda k, m: m * p.lane_blocks + k))
    (weight,) = _strip(p.tokens, p.length, (0, 0), _LANES, _weight_block(windows.streams))
    entry = _strip(p.entries, p.count, p.entry_halo, _ROWS, _rows_by_lanes(p.lanes, lambda k, m: k))
    flat = _flat(payload)
    run = _call(
        functools.partial(_scalar_backward_kernel, p),
        (p.lane_blocks, p.batch, pl.cdiv(p.length, p.tokens), p.streams),
        [token, weight, entry],
        [(token, jax.ShapeDtypeStruct(flat.shape, flat.dtype)), (weight, jax.ShapeDtypeStruct(weights.shape, _f32))],
        [],
        1,
        interpret,
    )
    payload_bar, weights_bar = run(flat, weights, [out_bar.reshape(p.batch, p.count, -1)] * len(entry))
    return payload_bar.reshape(payload.shape), weights_bar
