"""How kernels see joint attention: keys in one row, [entries | tokens], in blocks of which some hold nothing seen."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from phase_jax.axes import KeysAndValues
from phase_jax.geometry import ExactBranch

LANES = 128


@dataclass(frozen=True)
class Layout:
    """Queries and keys as a kernel sees them: `length` tokens padded to `queries`, and `keys` of which the first
    `entries` are entries and padding, and the others tokens and padding; all in blocks of `rows` and `columns`."""

    exact: ExactBranch
    length: int
    most_rows: int
    most_columns: int

    @property
    def entries(self) -> int:
        count = self.exact.windows.count(self.length) if self.exact.windows else 0
        return _up_to_multiple(count, LANES)

    @property
    def rows(self) -> int:
        return min(self.most_rows, _up_to_multiple(self.length, LANES))

    @property
    def queries(self) -> int:
        return _up_to_multiple(self.length, self.rows)

    @property
    def columns(self) -> int:
        return min(self.most_columns, _up_to_multiple(self.entries + self.length, LANES))

    @property
    def keys(self) -> int:
        return _up_to_multiple(self.entries + self.length, max(self.columns, LANES))

    def in_a_row(self, entries: KeysAndValues | None, tokens: KeysAndValues) -> list[jax.Array]:
        """Keys, and values, of all: two of [B, keys, K, H]."""
        if entries is not None:
            tokens = [jnp.concatenate([pad(e, self.entries), t], axis=1) for e, t in zip(entries, tokens, strict=True)]
        return [pad(x, self.keys) for x in tokens]

    def seen(self, t: jax.Array, k: jax.Array) -> jax.Array:
        """Whether the query at t sees key k. Padding is seen by padding alone: no real query comes so late that it
        would see an entry after the last, or a token after itself."""
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
            """Each query sees keys `first` to `last`, none where first is above last."""
            some = first <= last
            row = t[some] // self.rows
            np.add.at(counts, (row, first[some] // self.columns), 1)
            np.add.at(counts, (row, last[some] // self.columns + 1), -1)

        add(self.entries + self.exact.first(t), self.entries + t)
        if self.exact.windows:
            add(np.zeros_like(t), self.exact.windows.closed(t) - 1)
        return np.cumsum(counts, axis=1)[:, :-1] > 0


def visits(visited: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The visited blocks of every row in order, int32 [rows, most], and how many they are, int32 [rows].

    A row with fewer than most stays at its last one.
    """
    number = visited.sum(axis=1, dtype=np.int32)
    order = np.argsort(~visited, axis=1, kind="stable")
    last = np.maximum(number - 1, 0)[:, None]
    steps = np.minimum(np.arange(max(1, number.max())), last)
    return np.take_along_axis(order, steps, axis=1).astype(np.int32), number


def pad(x: jax.Array, to: int) -> jax.Array:
    """Zeros after the end of axis 1."""
    return jnp.pad(x, [(0, 0), (0, to - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


def _up_to_multiple(number: int, of: int) -> int:
    return -(-number // of) * of
