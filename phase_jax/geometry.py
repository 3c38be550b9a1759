"""Windows, phases and visibility: all index arithmetic of chunked compression (SPEC §1).

Tokens are at positions t = 0 … T−1. Window j covers W positions from `origin + j·S`; its entry becomes visible once
its last position has passed. Functions take Python numbers, numpy or JAX arrays alike, so the same rule serves a
test, a mask and a kernel.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

ExactRule = Literal["window", "tail", "none"]


@dataclass(frozen=True)
class Windows:
    """Windows of `width` W tokens every `stride` S tokens, the first one starting at `origin` (in −(W−1) … 0).

    Raises ValueError where 1 ≤ S ≤ W or −(W−1) ≤ origin ≤ 0 does not hold.
    """

    width: int
    stride: int
    origin: int = 0

    def __post_init__(self):
        if not 1 <= self.stride <= self.width:
            raise ValueError(
                f"stride {self.stride} with window width {self.width}: the stride must be between 1 and the width,"
                " or some tokens would be in no window"
            )
        if not -(self.width - 1) <= self.origin <= 0:
            raise ValueError(
                f"window origin {self.origin}: it must be between {-(self.width - 1)} (minus width plus 1) and 0"
            )

    @property
    def streams(self) -> int:
        """M = ⌈W/S⌉, the most windows that share one token."""
        return -(-self.width // self.stride)

    def count(self, length: int) -> int:
        """J, the number of windows that have closed after `length` tokens."""
        return max(0, (length - self.width - self.origin) // self.stride + 1)

    def start(self, j):
        """First position of window j; may be negative."""
        return self.origin + self.stride * j

    def starts(self, length: int) -> np.ndarray:
        """First position of each closed window, [J]; may be negative."""
        return self.start(np.arange(self.count(length)))

    def close(self, j):
        """Last position of window j."""
        return self.start(j) + self.width - 1

    def closes(self, length: int) -> np.ndarray:
        """Last position of each closed window, [J]."""
        return self.close(np.arange(self.count(length)))

    def rope_positions(self, length: int) -> np.ndarray:
        """Position at which the key of each closed window is rotated, [J]."""
        return self.rope_position(np.arange(self.count(length)))

    def rope_position(self, j):
        """Position at which the key of entry j is rotated, start_j + W − S; may be negative."""
        return self.start(j) + self.width - self.stride

    def closed(self, t):
        """How many windows have closed at or before position t (the count of entries that a query at t sees)."""
        return ((t - self.width - self.origin + 1) // self.stride + 1).clip(0)

    def most_closing(self, length: int) -> int:
        """The most windows that close within any `length` consecutive tokens, ⌈length/S⌉."""
        return -(-length // self.stride)

    def phase(self, t):
        """Reported phase, t mod S."""
        return t % self.stride

    def local_phase(self, t):
        """Phase relative to the window grid, (t − origin) mod S."""
        return (t - self.origin) % self.stride

    def parted(self, t):
        """Whether no window holds both t and t + 1: a boundary, which exists only where windows do not overlap."""
        return (self.local_phase(t) == self.stride - 1) & (self.width == self.stride)

    def visible(self, t, length: int):
        """Whether entry j is visible to a query at t: close_j ≤ t; shape of t with an axis J added."""
        return self.closes(length) <= t[..., None]


@dataclass(frozen=True)
class ExactBranch:
    """Which exact tokens a query sees beside the visible entries: always the range `first(t) … t`.

    `window`: the last `width` tokens, self included. `tail`: the tokens after the last closed window. `none`: no exact
    token, except before the first window closes, where the tail rule keeps every row non-empty. Without windows
    (full attention) every past token is exact.

    Raises ValueError for an unknown rule, or a window so narrow that some past token would be visible nowhere.
    """

    windows: Windows | None
    rule: ExactRule = "window"
    width: int = 16

    def __post_init__(self):
        if self.rule not in ("window", "tail", "none"):
            raise ValueError(f"exact branch '{self.rule}': choose window, tail or none")
        if self.windows and self.rule == "window" and self.width < self._uncovered:
            raise ValueError(
                f"exact window of {self.width} tokens: windows of {self.windows.width} every {self.windows.stride} from"
                f" {self.windows.origin} need at least {self._uncovered}, or some past tokens would be visible nowhere"
            )

    @property
    def _uncovered(self) -> int:
        """The longest run of past tokens that no closed window covers."""
        return max(self.windows.stride - 1, self.windows.width + self.windows.origin - 1, 1)

    @property
    def reach(self) -> int | None:
        """The most exact tokens any query sees; None for full attention, where there is no bound."""
        if self.windows is None:
            return None
        return self.width if self.rule == "window" else self._uncovered

    def first(self, t, closed=None):
        """First exact position that a query at t sees; t + 1 where it sees none.

        `closed`, how many windows have closed by t, is for callers that have it; where none has, it may be anything.
        """
        if self.windows is None:
            return 0 * t
        if self.rule == "window":
            return (t - self.width + 1).clip(0)
        some_closed = t >= self.windows.close(0)
        if self.rule == "tail":
            closed = self.windows.closed(t) if closed is None else closed
            return (self.windows.close(closed - 1) + 1) * some_closed
        return (t + 1) * some_closed


def common_residues(strides: Iterable[int]) -> int:
    """R, the fewest residues in which every one of the strides folds evenly: their least common multiple."""
    return math.lcm(*strides)


def cached_numbers(windows: Windows | None, exact: ExactBranch, length: int) -> tuple[int, int]:
    """(entries, exact tokens) that one layer keeps after `length` tokens (SPEC §1)."""
    if windows is None:
        return 0, length
    return windows.count(length), min(length, exact.reach)
