"""Joint attention on Hopper GPUs in Mosaic: flash attention (Dao 2023) over lists of the blocks that hold anything.

Masses are kept as logarithms to base two.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.joint_attention.layout import Layout, pad, visits
from pallas_kernels.online_softmax import MASKED
from phase_jax.axes import Queries
from phase_jax.geometry import ExactBranch

_ROWS, _COLUMNS = 64, 64


def unsupported(q: Queries) -> str | None:
    """Why queries cannot be served, None where they can."""
    if q.dtype != jnp.bfloat16:
        return f"{q.dtype} queries: its matrix products take bfloat16"
    if q.shape[-1] not in (64, 128):
        return f"heads of {q.shape[-1]} channels: its blocks hold 64 or 128"
    return None


def joint_attention(q, entries, tokens, sink, exact: ExactBranch, interpret: bool) -> Queries:
    """See `pallas_kernels.joint_attention`."""
    _, length, heads, head_dim = q.shape
    layout = Layout(exact, length, _ROWS, _COLUMNS)
    k, v = layout.in_a_row(entries, tokens)
    # A sink that weighs nothing: one kernel for both.
    sink = jnp.full((heads,), MASKED) if sink is None else sink.astype(jnp.float32)
    return _attention(layout, interpret, pad(q * head_dim**-0.5, layout.queries), k, v, sink)[:, :length]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(layout: Layout, interpret: bool, q: jax.Array, k: jax.Array, v: jax.Array, sink: jax.Array) -> jax.Array:
    return _forward(layout, interpret, q, k, v, sink)[0]


def _attention_forward(layout, interpret, q, k, v, sink):
    out, log_mass = _forward(layout, interpret, q, k, v, sink)
    return out, (q, k, v, sink, out, log_mass)


def _attention_backward(layout, interpret, saved, d_out):
    q, k, v, sink, out, log_mass = saved
    # What the softmax takes off every score's gradient, [B, N, T].
    mean = jnp.einsum("btnh,btnh->bnt", out, d_out, preferred_element_type=jnp.float32)
    d_q = _backward_queries(layout, interpret, q, k, v, d_out, log_mass, mean)
    d_k, d_v = _backward_keys(layout, interpret, q, k, v, d_out, log_mass, mean)
    d_sink = -(jnp.exp2(sink[:, None] * hopper.LOG2_E - log_mass) * mean).sum(axis=(0, 2))
    return d_q, d_k, d_v, d_sink


_attention.defvjp(_attention_forward, _attention_backward)


def _forward(layout, interpret, q, k, v, sink):
    """(out [B, T, N, H], base-2 logarithm of each query's mass [B, N, T])."""
    batch, length, heads, head_dim = q.shape
    group, rows, columns = heads // k.shape[2], layout.rows, layout.columns
    blocks, number = visits(layout.visited())
    registers = hopper.registers(interpret)

    def body(q_ref, k_ref, v_ref, sink_ref, blocks_ref, number_ref, out_ref, log_mass_ref, *scratch):
        q_smem, k_smem, v_smem, p_smem, row_smem, barrier, arrived, free = scratch
        b, n, i = (jax.lax.axis_index(name) for name in ("batch", "heads", "blocks"))
        kv_head, mine = jax.lax.div(n, jnp.int32(group)), pl.ds(i * rows, rows)

        def fetch(step, slot):
            theirs = pl.ds(blocks_ref[i, step] * columns, columns)
            plgpu.copy_gmem_to_smem(k_ref.at[b, theirs, kv_head], k_smem.at[slot], arrived.at[slot])
            plgpu.copy_gmem_to_smem(v_ref.at[b, theirs, kv_head], v_smem.at[slot], arrived.at[slot])

        def absorb(step, slot, carry):
            top, mass, values = carry
            scores = hopper.product(q_smem, k_smem.at[slot], registers, transposed=True)
            t, k = hopper.positions(i * rows, blocks_ref[i, step] * columns, (rows, columns), registers)
            scores = jnp.where(layout.seen(t, k), scores * hopper.LOG2_E, MASKED)
            new_top = jnp.maximum(top, scores.max(axis=1))
            weights = jnp.exp2(scores - hopper.across(new_top, scores.shape, 0))
            kept = jnp.exp2(top - new_top)
            mass = mass * kept + weights.sum(axis=1)
            added = hopper.staged_product(weights, v_smem.at[slot], p_smem, registers)
            return new_top, mass, values * hopper.across(kept, values.shape, 0) + added

        plgpu.copy_gmem_to_smem(q_ref.at[b, mine, n], q_smem, barrier)
        top = hopper.filled(sink_ref[n] * hopper.LOG2_E, (rows,), registers.by_row)
        carry = (
            top,
            hopper.filled(1.0, (rows,), registers.by_row),
            hopper.filled(0.0, (rows, head_dim), registers.matrix),
        )
        top, mass, values = hopper.over_blocks(number_ref[i], fetch, absorb, carry, arrived, free, barrier)
        q_smem[...] = (values / hopper.across(mass, values.shape, 0)).astype(q_smem.dtype)
        row_smem[...] = top + jnp.log(mass) * hopper.LOG2_E
        hopper.write((q_smem, out_ref.at[b, mine, n]), (row_smem, log_mass_ref.at[b, n, mine]))

    return hopper.kernel(
        body,
        (q, jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)),
        {"batch": batch, "heads": heads, "blocks": length // rows},
        [
            hopper.operand(rows, head_dim),
            hopper.operand(2, columns, head_dim),
            hopper.operand(2, columns, head_dim),
            hopper.operand(rows, columns),
            plgpu.SMEM((rows,), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=2, num_barriers=2),
            plgpu.Barrier(num_barriers=2),
        ],
        interpret,
    )(q, k, v, sink, blocks, number)


def _backward_queries(layout, interpret, q, k, v, d_out, log_mass, mean):
    """Gradient of the queries [B, T, N, H]."""
    batch, length, heads, head_dim = q.shape
    group, rows, columns = heads // k.shape[2], layout.rows, layout.columns
    blocks, number = visits(layout.visited())
    registers = hopper.registers(interpret)

    def body(q_ref, k_ref, v_ref, d_out_ref, log_mass_ref, mean_ref, blocks_ref, number_ref, d_q_ref, *scratch):
        q_smem, d_out_smem, log_mass_smem, mean_smem, k_smem, v_smem, p_smem, barrier, arrived, free = scratch
        b, n, i = (jax.lax.axis_index(name) for name in ("batch", "heads", "blocks"))
        kv_head, mine = jax.lax.div(n, jnp.int32(group)), pl.ds(i * rows, rows)

        def fetch(step, slot):
            theirs = pl.ds(blocks_ref[i, step] * columns, columns)
            plgpu.copy_gmem_to_smem(k_ref.at[b, theirs, kv_head], k_smem.at[slot], arrived.at[slot])
            plgpu.copy_gmem_to_smem(v_ref.at[b, theirs, kv_head], v_smem.at[slot], arrived.at[slot])

        def absorb(step, slot, d_q):
            scores = hopper.product(q_smem, k_smem.at[slot], registers, transposed=True)
            t, k = hopper.positions(i * rows, blocks_ref[i, step] * columns, (rows, columns), registers)
            scores = jnp.where(layout.seen(t, k), scores * hopper.LOG2_E, MASKED)
            log_mass = hopper.across(hopper.held(log_mass_smem[...], registers.by_row), scores.shape, 0)
            mean = hopper.across(hopper.held(mean_smem[...], registers.by_row), scores.shape, 0)
            d_weights = hopper.product(d_out_smem, v_smem.at[slot], registers, transposed=True)
            d_scores = jnp.exp2(scores - log_mass) * (d_weights - mean)
            return d_q + hopper.staged_product(d_scores, k_smem.at[slot], p_smem, registers)

        plgpu.copy_gmem_to_smem(q_ref.at[b, mine, n], q_smem, barrier)
        plgpu.copy_gmem_to_smem(d_out_ref.at[b, mine, n], d_out_smem, barrier)
        plgpu.copy_gmem_to_smem(log_mass_ref.at[b, n, mine], log_mass_smem, barrier)
        plgpu.copy_gmem_to_smem(mean_ref.at[b, n, mine], mean_smem, barrier)
        d_q = hopper.filled(0.0, (rows, head_dim), registers.matrix)
        d_q = hopper.over_blocks(number_ref[i], fetch, absorb, d_q, arrived, free, barrier)
        q_smem[...] = d_q.astype(q_smem.dtype)
        hopper.write((q_smem, d_q_ref.at[b, mine, n]))

    return hopper.kernel(
        body,
        q,
        {"batch": batch, "heads": heads, "blocks": length // rows},
        [
            hopper.operand(rows, head_dim),
            hopper.operand(rows, head_dim),
            plgpu.SMEM((rows,), jnp.float32),
            plgpu.SMEM((rows,), jnp.float32),
            hopper.operand(2, columns, head_dim),
            hopper.operand(2, columns, head_dim),
            hopper.operand(rows, columns),
            plgpu.Barrier(num_arrivals=4),
            plgpu.Barrier(num_arrivals=2, num_barriers=2),
            plgpu.Barrier(num_barriers=2),
        ],
        interpret,
    )(q, k, v, d_out, log_mass, mean, blocks, number)


def _backward_keys(layout, interpret, q, k, v, d_out, log_mass, mean):
    """Gradients of keys and values, two of [B, keys, K, H]: each block of keys meets all heads that read it."""
    batch, keys, kv_heads, head_dim = k.shape
    group, rows, columns = q.shape[2] // kv_heads, layout.rows, layout.columns
    blocks, number = visits(layout.visited().T)
    registers = hopper.registers(interpret)

    def body(
        q_ref, k_ref, v_ref, d_out_ref, log_mass_ref, mean_ref, blocks_ref, number_ref, d_k_ref, d_v_ref, *scratch
    ):
        k_smem, v_smem, q_smem, d_out_smem, log_mass_smem, mean_smem, p_smem, barrier, arrived, free = scratch
        b, kv_head, j = (jax.lax.axis_index(name) for name in ("batch", "heads", "blocks"))
        mine = pl.ds(j * columns, columns)

        def block_of(step):
            return blocks_ref[j, jax.lax.div(step, jnp.int32(group))]

        def fetch(step, slot):
            n = kv_head * group + jax.lax.rem(step, jnp.int32(group))
            theirs = pl.ds(block_of(step) * rows, rows)
            plgpu.copy_gmem_to_smem(q_ref.at[b, theirs, n], q_smem.at[slot], arrived.at[slot])
            plgpu.copy_gmem_to_smem(d_out_ref.at[b, theirs, n], d_out_smem.at[slot], arrived.at[slot])
            plgpu.copy_gmem_to_smem(log_mass_ref.at[b, n, theirs], log_mass_smem.at[slot], arrived.at[slot])
            plgpu.copy_gmem_to_smem(mean_ref.at[b, n, theirs], mean_smem.at[slot], arrived.at[slot])

        def absorb(step, slot, carry):
            d_k, d_v = carry
            shape = (columns, rows)
            scores = hopper.product(k_smem, q_smem.at[slot], registers, transposed=True)
            k, t = hopper.positions(j * columns, block_of(step) * rows, shape, registers)
            scores = jnp.where(layout.seen(t, k), scores * hopper.LOG2_E, MASKED)
            log_mass = hopper.across(hopper.held(log_mass_smem[slot], registers.by_column), shape, 1)
            mean = hopper.across(hopper.held(mean_smem[slot], registers.by_column), shape, 1)
            weights = jnp.exp2(scores - log_mass)
            d_v += hopper.staged_product(weights, d_out_smem.at[slot], p_smem, registers)
            d_weights = hopper.product(v_smem, d_out_smem.at[slot], registers, transposed=True)
            return d_k + hopper.staged_product(weights * (d_weights - mean), q_smem.at[slot], p_smem, registers), d_v

        plgpu.copy_gmem_to_smem(k_ref.at[b, mine, kv_head], k_smem, barrier)
        plgpu.copy_gmem_to_smem(v_ref.at[b, mine, kv_head], v_smem, barrier)
        nothing = hopper.filled(0.0, (columns, head_dim), registers.matrix)
        carry = nothing, nothing
        d_k, d_v = hopper.over_blocks(number_ref[j] * group, fetch, absorb, carry, arrived, free, barrier)
        k_smem[...] = d_k.astype(k_smem.dtype)
        v_smem[...] = d_v.astype(v_smem.dtype)
        hopper.write((k_smem, d_k_ref.at[b, mine, kv_head]), (v_smem, d_v_ref.at[b, mine, kv_head]))

    return hopper.kernel(
        body,
        (k, v),
        {"batch": batch, "heads": kv_heads, "blocks": keys // columns},
        [
            hopper.operand(columns, head_dim),
            hopper.operand(columns, head_dim),
            hopper.operand(2, rows, head_dim),
            hopper.operand(2, rows, head_dim),
            plgpu.SMEM((2, rows), jnp.float32),
            plgpu.SMEM((2, rows), jnp.float32),
            hopper.operand(columns, rows),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=4, num_barriers=2),
            plgpu.Barrier(num_barriers=2),
        ],
        interpret,
    )(q, k, v, d_out, log_mass, mean, blocks, number)
