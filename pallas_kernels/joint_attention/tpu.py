"""Joint attention on TPUs: jax's splash attention over keys laid out as [entries | tokens].

The kernel computes the mask itself, from positions, and is told which blocks of it hold anything; jax has no public way
to say either but by listing the mask's elements, so this file alone builds its `MaskInfo`, the same in jax 0.10 and
0.11.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import (
    DEFAULT_MASK_VALUE,
    BlockSizes,
    SplashAttentionKernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo

from phase_jax.axes import KeysAndValues, Queries
from phase_jax.geometry import ExactBranch

_LANES = 128
_ROWS, _COLUMNS = 512, 1024  # the most queries and keys of a block


@dataclass(frozen=True)
class Layout:
    """Queries and keys as the kernel sees them: `length` tokens padded to `queries`, and `keys` of which the first
    `entries` are entries and padding, and the others tokens and padding; all in blocks of `rows` and `columns`."""

    exact: ExactBranch
    length: int

    @property
    def entries(self) -> int:
        count = self.exact.windows.count(self.length) if self.exact.windows else 0
        return _up_to_multiple(count, _LANES)

    @property
    def rows(self) -> int:
        return min(_ROWS, _up_to_multiple(self.length, _LANES))

    @property
    def queries(self) -> int:
        return _up_to_multiple(self.length, self.rows)

    @property
    def columns(self) -> int:
        return min(_COLUMNS, _up_to_multiple(self.entries + self.length, _LANES))

    @property
    def keys(self) -> int:
        return _up_to_multiple(self.entries + self.length, self.columns)

    def seen(self, t: jax.Array, k: jax.Array) -> jax.Array:
        """Whether the query at t sees key k of the layout. Padding is seen by padding alone: no real query comes so
        late that it would see an entry after the last, or a token after itself."""
        windows, u = self.exact.windows, k - self.entries
        if windows is None:
            return u <= t
        # Mosaic cannot lower `//` without a TPU at hand; where some window has closed, this is the same.
        closed = jax.lax.div(t - windows.close(0), windows.stride) + 1
        token = (u >= 0) & (u >= self.exact.first(t, closed)) & (u <= t)
        return token | ((u < 0) & (windows.close(k) <= t))

    def visited(self) -> np.ndarray:
        """Which blocks hold a key that some query sees, bool [blocks of rows, blocks of columns]."""
        t = np.arange(self.length)
        counts = np.zeros((self.queries // self.rows, self.keys // self.columns + 1), np.int32)

        def add(first, last):
            """Each query sees keys first … last of the layout, none where first is above last."""
            some = first <= last
            row = t[some] // self.rows
            np.add.at(counts, (row, first[some] // self.columns), 1)
            np.add.at(counts, (row, last[some] // self.columns + 1), -1)

        add(self.entries + self.exact.first(t), self.entries + t)
        if self.exact.windows:
            add(np.zeros_like(t), self.exact.windows.closed(t) - 1)
        return np.cumsum(counts, axis=1)[:, :-1] > 0


def joint_attention(
    q: Queries,
    entries: KeysAndValues | None,
    tokens: KeysAndValues,
    exact: ExactBranch,
    sink: jax.Array | None = None,
    interpret: bool = False,
) -> Queries:
    """See `pallas_kernels.joint_attention`."""
    _, length, _, head_dim = q.shape
    layout = Layout(exact, length)
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

    def padded(x, to):
        return jnp.pad(x, [(0, 0), (0, to - x.shape[1]), (0, 0), (0, 0)])

    def keys(tokens, entries):
        if entries is not None:
            tokens = jnp.concatenate([padded(entries, layout.entries), tokens], axis=1)
        return jnp.swapaxes(padded(tokens, layout.keys), 1, 2)

    k, v = map(keys, tokens, entries or (None, None))
    q = jnp.swapaxes(padded(q * head_dim**-0.5, layout.queries), 1, 2)
    out = jax.vmap(lambda q, k, v: kernel(q, k, v, sinks=sink))(q, k, v)
    return jnp.swapaxes(out, 1, 2)[:, :length]


@functools.cache
def mask_infos(layout: Layout) -> tuple[MaskInfo, MaskInfo, MaskInfo]:
    """What the kernel is told of the mask, of its forward pass and of the gradients of queries and of keys."""
    visited = layout.visited()
    queries = _mask_info(layout, *_work(visited))
    keys = _mask_info(layout, *(x.T for x in _work(visited.T)))
    return queries, queries, keys


def _work(visited: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The visited blocks of every row in order, int32 [rows, most], and which of them are to be visited, bool.

    A row with fewer stays at its last one, which costs no transfer.
    """
    number = visited.sum(axis=1, keepdims=True)
    step = np.arange(max(1, number.max()))
    order = np.argsort(~visited, axis=1, kind="stable")
    blocks = np.take_along_axis(order, np.minimum(step, np.maximum(number - 1, 0)), axis=1)
    return blocks.astype(np.int32), step < number


def _mask_info(layout: Layout, blocks: np.ndarray, visit: np.ndarray) -> MaskInfo:
    return MaskInfo(
        data_next=blocks[None],
        mask_next=None,
        block_mask=visit[None].astype(np.int8),
        partial_mask_blocks=None,
        q_sequence=np.arange(layout.queries, dtype=np.int32),
    )


def _up_to_multiple(number: int, of: int) -> int:
    return -(-number // of) * of
