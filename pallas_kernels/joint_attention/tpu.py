"""Joint attention on TPUs: jax's splash attention over keys in one row.

The kernel computes the mask itself, from positions, and is told which blocks of it hold anything; jax has no public way
to say either but by listing the mask's elements, so this file alone builds its `MaskInfo`, the same in jax 0.10 and
0.11.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import (
    DEFAULT_MASK_VALUE,
    BlockSizes,
    SplashAttentionKernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from pallas_kernels.joint_attention.layout import Layout, pad, visits
from phase_jax.axes import Queries
from phase_jax.geometry import ExactBranch


def layout_of(exact: ExactBranch, length: int) -> Layout:
    return Layout(exact, length, most_rows=512, most_columns=512)


def unsupported(q: Queries) -> str | None:
    """Why queries cannot be served, None where they can."""
    return None if q.dtype in (jnp.float32, jnp.bfloat16) else f"{q.dtype} queries: it takes float32 and bfloat16"


def joint_attention(q, entries, tokens, sink, exact: ExactBranch, interpret: bool) -> Queries:
    """See `pallas_kernels.joint_attention`."""
    _, length, _, head_dim = q.shape
    layout = layout_of(exact, length)
    kernel = SplashAttentionKernel(
        *mask_infos(layout),
        block_sizes=BlockSizes(
            block_q=layout.rows,
            block_kv=layout.columns,
            block_q_dkv=layout.rows,
            block_kv_dkv=layout.columns,
            block_q_dq=layout.rows,
            block_kv_dq=layout.columns,
        ),
        is_mqa=False,
        save_residuals=False,
        mask_value=DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=None,
        residual_checkpoint_name=None,
        mask_function=layout.seen,
        interpret=interpret,
    )
    arrays = (pad(q * head_dim**-0.5, layout.queries), *layout.in_a_row(entries, tokens))
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in arrays)
    out = jax.vmap(lambda q, k, v: kernel(q, k, v, sinks=sink))(q, k, v)
    return jnp.swapaxes(out, 1, 2)[:, :length]


@functools.cache
def mask_infos(layout: Layout) -> tuple[MaskInfo, MaskInfo, MaskInfo]:
    """What the kernel is told of the mask, of its forward pass and of the gradients of queries and of keys."""
    visited = layout.visited()
    queries = _mask_info(layout, *_steps(visited))
    keys = _mask_info(layout, *(x.T for x in _steps(visited.T)))
    return queries, queries, keys


def _steps(visited: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks to visit [rows, steps], and at which steps; at the others the block before stays, nothing is fetched."""
    blocks, number = visits(visited)
    return blocks, np.arange(blocks.shape[1]) < number[:, None]


def _mask_info(layout: Layout, blocks: np.ndarray, visit: np.ndarray) -> MaskInfo:
    return MaskInfo(
        data_next=blocks[None],
        mask_next=None,
        block_mask=visit[None].astype(np.int8),
        partial_mask_blocks=None,
        q_sequence=np.arange(layout.queries, dtype=np.int32),
    )
