"""Decoding on TPUs: entries in blocks with an online softmax; blocks beyond a sequence's length are not fetched.

All heads of a sequence share one matrix product, in which a query scores other heads' keys too and then drops them:
the cache is read as it lies, and reading it is what takes the time.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.online_softmax import MASKED
from phase_jax.axes import KeysAndValues

_KEYS = 1024  # of a block, all heads together


def unsupported(q: jax.Array, far: KeysAndValues) -> str | None:
    """Why queries cannot be served, None where they can."""
    del far
    return None if q.dtype in (jnp.float32, jnp.bfloat16) else f"{q.dtype} queries: it takes float32 and bfloat16"


def decode_attention(q, far, near, count, first, sink, interpret: bool) -> jax.Array:
    """See reference.py."""
    batch, kv_heads, group, head_dim = q.shape
    heads, length = kv_heads * group, far[0].shape[1]
    block = min(length, max(16, _KEYS // kv_heads // 16 * 16))

    def flat(x):
        return x.reshape(batch, -1, head_dim)

    def whole(rows):
        return pl.BlockSpec((None, rows, head_dim), lambda b, j, *_: (b, 0, 0))

    def entry_block(b, j, count_ref, first_ref):
        # Beyond the last block that is seen, that one again: nothing is transferred.
        return b, jnp.minimum(j, jnp.maximum(pl.cdiv(count_ref[b], block) - 1, 0)), 0

    entries = pl.BlockSpec((None, block * kv_heads, head_dim), entry_block)
    exact = None if near is None else whole(near[0].shape[1] * kv_heads)
    out = pl.pallas_call(
        functools.partial(_kernel, group=group, kv_heads=kv_heads),
        out_shape=jax.ShapeDtypeStruct((batch, heads, head_dim), far[1].dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, pl.cdiv(length, block)),
            in_specs=[
                whole(heads),
                entries,
                entries,
                exact,
                exact,
                None if sink is None else pl.BlockSpec((heads, 1), lambda b, j, *_: (0, 0)),
            ],
            out_specs=whole(heads),
            scratch_shapes=[
                pltpu.VMEM((heads, 1), jnp.float32),
                pltpu.VMEM((heads, 1), jnp.float32),
                pltpu.VMEM((heads, head_dim), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="decode_attention",
    )(
        count.astype(jnp.int32),
        jnp.zeros_like(count) if first is None else first.astype(jnp.int32),
        flat(q),
        *map(flat, far),
        *((None, None) if near is None else map(flat, near)),
        None if sink is None else sink.reshape(heads, 1),
    )
    return out.reshape(q.shape)


def _kernel(
    count_ref,
    first_ref,
    q_ref,
    k_ref,
    v_ref,
    near_k_ref,
    near_v_ref,
    sink_ref,
    out_ref,
    top,
    mass,
    values,
    *,
    group,
    kv_heads,
):
    sequence, step = pl.program_id(0), pl.program_id(1)
    q = q_ref[...]

    def absorb(keys, these, begin, end):
        """Adds keys and values [U · K, H], of which a query sees its head's of tokens `begin` to before `end`."""

        def between(shape, axis):
            index = jax.lax.broadcasted_iota(jnp.int32, shape, axis)
            return index, (index >= begin * kv_heads) & (index < end * kv_heads)

        scores = jax.lax.dot_general(q, keys, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        index, seen = between(scores.shape, 1)
        if kv_heads > 1:
            head = jax.lax.div(jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0), group)
            seen &= jax.lax.rem(index, kv_heads) == head
        scores = jnp.where(seen, scores, MASKED)
        new_top = jnp.maximum(top[...], scores.max(axis=1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - new_top), 0.0)
        kept = jnp.exp(top[...] - new_top)
        # What lies beyond the array may be anything, and nought times anything may be no number.
        these = jnp.where(between(these.shape, 0)[1], these, 0)
        added = jax.lax.dot_general(
            weights.astype(these.dtype), these, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        )
        top[...] = new_top
        mass[...] = mass[...] * kept + weights.sum(axis=1, keepdims=True)
        values[...] = values[...] * kept + added

    @pl.when(step == 0)
    def _():
        nothing = jnp.zeros(top.shape, jnp.float32)
        top[...] = nothing + MASKED if sink_ref is None else sink_ref[...]
        mass[...] = nothing if sink_ref is None else nothing + 1
        values[...] = jnp.zeros(values.shape, jnp.float32)
        if near_k_ref is not None:
            absorb(near_k_ref[...], near_v_ref[...], first_ref[sequence], near_k_ref.shape[0])

    left = count_ref[sequence] - step * (k_ref.shape[0] // kv_heads)

    @pl.when(left > 0)
    def _():
        absorb(k_ref[...], v_ref[...], 0, left)

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        out_ref[...] = (values[...] / mass[...]).astype(out_ref.dtype)
