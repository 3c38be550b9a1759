"""Decoding on Hopper GPUs in Mosaic: the entries in parts, each a softmax of its own (flash decoding, Dao et al. 2023).

The parts and the few exact tokens, which XLA takes care of, are put together at the end.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.decode import reference
from pallas_kernels.online_softmax import MASKED
from phase_jax.axes import KeysAndValues

_ROWS, _COLUMNS = 64, 64
_PARTS = 264  # of all sequences and heads together: two for each multiprocessor of an H100 or H200


def unsupported(q: jax.Array, far: KeysAndValues) -> str | None:
    """Why queries [B, N, H] of entries [B, J, K, H] cannot be served, None where they can."""
    if q.dtype != jnp.bfloat16:
        return f"{q.dtype} queries: its matrix products take bfloat16"
    if q.shape[2] not in (64, 128):
        return f"heads of {q.shape[2]} channels: its blocks hold 64 or 128"
    if (group := q.shape[1] // far[0].shape[2]) > _ROWS:
        return f"{group} query heads a KV head: its blocks hold {_ROWS}"
    if far[0].shape[1] % 8:
        return f"a cache with room for {far[0].shape[1]} entries: they are fetched by eights"
    return None


def decode_attention(q, far, near, count, first, sink, interpret: bool) -> jax.Array:
    """See reference.py."""
    group = q.shape[2]
    tops, masses, values = _parts(jnp.pad(q, [(0, 0), (0, 0), (0, _ROWS - group), (0, 0)]), far, count, interpret)
    exact = reference.exact_tokens(q, near, first, sink)
    tops = jnp.concatenate([exact.top[..., None, :, 0], tops[..., :group] / hopper.LOG2_E], axis=2)
    masses = jnp.concatenate([exact.mass[..., None, :, 0], masses[..., :group]], axis=2)
    values = jnp.concatenate([exact.out[:, :, None, :, 0], values[..., :group, :]], axis=2)
    shares = jnp.exp(tops - tops.max(axis=2, keepdims=True))
    mass = (masses * shares).sum(axis=2)
    return ((values * shares[..., None]).sum(axis=2) / mass[..., None]).astype(far[1].dtype)


def _parts(q, far, count, interpret):
    """Softmaxes of parts of the entries: (base-2 top [B, K, P, rows], mass, weighted values [B, K, P, rows, H])."""
    batch, kv_heads, rows, head_dim = q.shape
    columns = _COLUMNS
    blocks = pl.cdiv(far[0].shape[1], columns)
    each = pl.cdiv(blocks, max(1, _PARTS // (batch * kv_heads)))
    parts = pl.cdiv(blocks, each)
    registers = hopper.registers(interpret)

    def body(q_ref, k_ref, v_ref, count_ref, top_ref, mass_ref, values_ref, *scratch):
        q_smem, k_smem, v_smem, p_smem, top_smem, mass_smem, values_smem, barrier, arrived, free = scratch
        b, h, part = (jax.lax.axis_index(name) for name in ("batch", "heads", "parts"))
        seen, begin = count_ref[b], part * each
        number = jnp.clip(jax.lax.div(seen + columns - 1, jnp.int32(columns)) - begin, 0, each)

        def fetch(step, slot):
            theirs = pl.ds((begin + step) * columns, columns)
            plgpu.copy_gmem_to_smem(k_ref.at[b, theirs, h], k_smem.at[slot], arrived.at[slot])
            plgpu.copy_gmem_to_smem(v_ref.at[b, theirs, h], v_smem.at[slot], arrived.at[slot])

        def absorb(step, slot, carry):
            top, mass, values = carry
            scores = hopper.product(q_smem, k_smem.at[slot], registers, transposed=True)
            _, j = hopper.positions(0, (begin + step) * columns, scores.shape, registers)
            scores = jnp.where(j < seen, scores * hopper.LOG2_E, MASKED)
            new_top = jnp.maximum(top, scores.max(axis=1))
            weights = jnp.exp2(scores - hopper.across(new_top, scores.shape, 0))
            kept = jnp.exp2(top - new_top)
            added = hopper.staged_product(weights, v_smem.at[slot], p_smem, registers)
            mass = mass * kept + weights.sum(axis=1)
            return new_top, mass, values * hopper.across(kept, values.shape, 0) + added

        plgpu.copy_gmem_to_smem(q_ref.at[b, h], q_smem, barrier)
        top = hopper.filled(MASKED, (rows,), registers.by_row)
        mass = hopper.filled(0.0, (rows,), registers.by_row)
        values = hopper.filled(0.0, (rows, head_dim), registers.matrix)
        top, mass, values = hopper.over_blocks(number, fetch, absorb, (top, mass, values), arrived, free, barrier)
        top_smem[...], mass_smem[...], values_smem[...] = top, mass, values
        here = b, h, part
        hopper.write((top_smem, top_ref.at[here]), (mass_smem, mass_ref.at[here]), (values_smem, values_ref.at[here]))

    of_rows = jax.ShapeDtypeStruct((batch, kv_heads, parts, rows), jnp.float32)
    return hopper.kernel(
        body,
        (of_rows, of_rows, jax.ShapeDtypeStruct((*of_rows.shape, head_dim), jnp.float32)),
        {"parts": parts, "heads": kv_heads, "batch": batch},
        [
            hopper.operand(rows, head_dim),
            hopper.operand(2, columns, head_dim),
            hopper.operand(2, columns, head_dim),
            hopper.operand(rows, columns),
            plgpu.SMEM((rows,), jnp.float32),
            plgpu.SMEM((rows,), jnp.float32),
            plgpu.SMEM((rows, head_dim), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=2, num_barriers=2),
            plgpu.Barrier(num_barriers=2),
        ],
        interpret,
    )(q, *far, count.astype(jnp.int32))
