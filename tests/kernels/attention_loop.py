"""Attention over entries and exact tokens in numpy float64, a query and a head at a time, with its gradients.

From the words of the specification: windows are listed one by one, and nothing is shared with the package.
"""

from typing import NamedTuple

import numpy as np


class Geometry(NamedTuple):
    """`width` None is full attention; `rule` and `exact_width` are those of the exact branch."""

    width: int | None
    stride: int | None = None
    origin: int = 0
    rule: str = "window"
    exact_width: int = 16

    def closes(self, length: int) -> list[int]:
        """Last position of each window that has closed after `length` tokens."""
        found, close = [], self.origin + self.width - 1
        while close < length:
            found.append(close)
            close += self.stride
        return found

    def exact(self, t: int) -> range:
        """Exact positions that a query at t sees."""
        if self.width is None:
            return range(t + 1)
        if self.rule == "window":
            return range(max(0, t - self.exact_width + 1), t + 1)
        closed = [close for close in self.closes(t + 1) if close <= t]
        if self.rule == "none" and closed:
            return range(0)
        return range(closed[-1] + 1 if closed else 0, t + 1)


def attention(geometry: Geometry, q, entries, tokens, sink=None, cotangent=None, start: int = 0):
    """(out [B, T, N, H], gradients of q, entry keys and values, token keys and values, sink) of queries at start + t.

    Entries [B, J, K, H] or None, tokens [B, U, K, H] from position 0 on, `sink` [N] or None; gradients are of the sum
    of out · cotangent, None without one.
    """
    q, sink = np.asarray(q, np.float64), None if sink is None else np.asarray(sink, np.float64)
    k, v = (np.asarray(x, np.float64) for x in tokens)
    entry_k, entry_v = (np.asarray(x, np.float64) for x in entries or (k[:, :0], v[:, :0]))
    batch, length, heads, head_dim = q.shape
    scale, group = head_dim**-0.5, heads // k.shape[2]
    out = np.zeros_like(q)
    dq, dentry_k, dentry_v, dk, dv = (np.zeros_like(x) for x in (q, entry_k, entry_v, k, v))
    dsink = None if sink is None else np.zeros_like(sink)
    closes = geometry.closes(start + length) if geometry.width else []
    for t in range(length):
        far = slice(sum(close <= start + t for close in closes))
        exact = geometry.exact(start + t)
        near = slice(exact.start, exact.stop)
        for b in range(batch):
            for n in range(heads):
                h = n // group
                keys = np.concatenate([entry_k[b, far, h], k[b, near, h]])
                values = np.concatenate([entry_v[b, far, h], v[b, near, h]])
                scores = keys @ q[b, t, n] * scale
                top = max(scores.max(), -np.inf if sink is None else sink[n])
                weights = np.exp(scores - top)
                mass = weights.sum() + (0 if sink is None else np.exp(sink[n] - top))
                weights = weights / mass
                out[b, t, n] = weights @ values
                if cotangent is None:
                    continue
                do = np.asarray(cotangent[b, t, n], np.float64)
                dscores = weights * (values @ do - do @ out[b, t, n])
                dq[b, t, n] = dscores @ keys * scale
                dkeys, dvalues = scale * np.outer(dscores, q[b, t, n]), np.outer(weights, do)
                dentry_k[b, far, h] += dkeys[: far.stop]
                dentry_v[b, far, h] += dvalues[: far.stop]
                dk[b, near, h] += dkeys[far.stop :]
                dv[b, near, h] += dvalues[far.stop :]
                if sink is not None:
                    dsink[n] -= np.exp(sink[n] - top) / mass * (do @ out[b, t, n])
    return out, (dq, dentry_k, dentry_v, dk, dv, dsink)
