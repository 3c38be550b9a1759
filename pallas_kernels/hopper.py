"""What attention kernels for Hopper GPUs have in common, in Mosaic: one warpgroup a block of the grid, which multiplies
one block of keys while the next is on its way."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2_E = math.log2(math.e)  # exponentials are powers of two


class Registers(NamedTuple):
    """How a warpgroup's registers hold a matrix, and what there is one of for each of its rows, or columns."""

    matrix: plgpu.Layout | None = None
    by_row: plgpu.Layout | None = None
    by_column: plgpu.Layout | None = None


_WGMMA = Registers(plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0))


def registers(interpret: bool) -> Registers:
    """Those of matrix products; none where the kernel is interpreted."""
    return Registers() if interpret else _WGMMA


def over_blocks(number, fetch, absorb, carry, arrived, free, barrier):
    """`absorb(step, slot, carry)` at every step, each step's block fetched into one of two slots a step before.

    `arrived` counts the copies into a slot, `free` says that a slot has been read, `barrier` that what stays has come.
    """

    @pl.when(number > 0)
    def _():
        fetch(0, 0)

    plgpu.barrier_wait(barrier)

    def one_step(step, carry):
        slot, other = jax.lax.rem(step, jnp.int32(2)), jax.lax.rem(step + 1, jnp.int32(2))

        @pl.when(step + 1 < number)
        def _():
            @pl.when(step > 0)
            def _():
                plgpu.barrier_wait(free.at[other])

            fetch(step + 1, other)

        plgpu.barrier_wait(arrived.at[slot])
        carry = absorb(step, slot, carry)

        @pl.when(step + 2 < number)  # where somebody will wait for it
        def _():
            plgpu.barrier_arrive(free.at[slot])

        return carry

    return jax.lax.fori_loop(0, number, one_step, carry)


def product(a, b, registers, transposed=False):
    """a · b, or a · bᵀ, of operands in shared memory: f32 in registers."""
    if registers.matrix is None:
        dimensions = ((1,), (1 if transposed else 0,)), ((), ())
        return jax.lax.dot_general(a[...], b[...], dimensions, preferred_element_type=jnp.float32)

    def multiply(acc):
        plgpu.wgmma(acc, a, plgpu.transpose_ref(b, (1, 0)) if transposed else b)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[0 if transposed else 1]), jnp.float32))


def staged_product(a, b, staging, registers):
    """a · b, of which `a` is in registers and passes through `staging`."""
    staging[...] = a.astype(staging.dtype)
    plgpu.commit_smem()
    return product(staging, b, registers)


def positions(first_row, first_column, shape, registers):
    """Indices of rows and of columns, two of int32 `shape`."""
    iota = jax.lax.broadcasted_iota
    if registers.matrix is not None:
        iota = functools.partial(plgpu.broadcasted_iota, layout=registers.matrix)
    return first_row + iota(jnp.int32, shape, 0), first_column + iota(jnp.int32, shape, 1)


def held(x, layout):
    return x if layout is None else plgpu.layout_cast(x, layout)


def across(x, shape, axis):
    return jax.lax.broadcast_in_dim(x, shape, [axis])


def filled(value, shape, layout):
    return held(jnp.full(shape, value, jnp.float32), layout)


def write(*pairs):
    """Copies from shared to global memory, and waits for them."""
    plgpu.commit_smem()
    for here, there in pairs:
        plgpu.copy_smem_to_gmem(here, there)
    plgpu.wait_smem_to_gmem(0)


def operand(*shape):
    """Shared memory laid out as matrix products want it."""
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))


def kernel(body, out, grid, scratch, interpret):
    return plgpu.kernel(
        body,
        out_type=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), out),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=_interpreter() if interpret else False,
    )


def _interpreter():
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return InterpretGPUParams()
