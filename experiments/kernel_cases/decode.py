"""Decoding: the Pallas form against plain JAX, in one pass and as attention of a single query in blocks."""

import jax.numpy as jnp

from experiments.kernel_cases import Case, normal
from pallas_kernels.decode import decode_attention, kind
from pallas_kernels.joint_attention import blockwise_attention
from phase_jax.geometry import ExactBranch, Windows


def _case(exact: ExactBranch, batch: int, length: int, heads: int, kv_heads: int, head_dim: int, dtype: str) -> Case:
    """Sequences of `length` tokens, in whose caches there is no room left."""
    windows = exact.windows
    far = (batch, windows.count(length) if windows else length, kv_heads, head_dim)
    near = (batch, exact.reach, kv_heads, head_dim) if windows else None
    shapes = [(batch, heads, head_dim), far, far, *[near] * (2 if near else 0)]
    keys = batch * (far[1] + (near[1] if near else 0))

    def arguments(key):
        return tuple(x.astype(dtype) for x in normal(key, *shapes))

    def form(implementation):
        def run(q, k, v, *near):
            return decode_attention(q, (k, v), near or None, exact, jnp.int32(length - 1), None, implementation)

        return run

    def blockwise(q, k, v, *near):
        return blockwise_attention(q[:, None], (k, v), near or None, exact, length - 1, 512)[:, 0]

    branch = f"{windows.width}/{windows.stride}" if windows else "full"
    return Case(
        kernel="decode",
        name=f"{branch}, N {heads}, K·H {kv_heads}·{head_dim}, B {batch}, T {length}, {dtype}",
        kind=kind(exact),
        dtype=dtype,
        arguments=arguments,
        pallas=form("pallas"),
        xla={"one pass": form("xla"), "blocks of 512": blockwise},
        bytes_least=(2 * keys * kv_heads + 2 * batch * heads) * head_dim * jnp.dtype(dtype).itemsize,
    )


_W8 = ExactBranch(Windows(8, 8), "window", 16)
_FULL = ExactBranch(None)

CASES = (
    _case(_W8, 8, 131_072, 16, 1, 128, "bfloat16"),
    _case(_W8, 8, 131_072, 16, 8, 128, "bfloat16"),
    _case(_FULL, 8, 16_384, 16, 1, 128, "bfloat16"),
    _case(_W8, 8, 32_768, 4, 1, 32, "float32"),
    _case(_FULL, 8, 4096, 4, 1, 32, "float32"),
)
