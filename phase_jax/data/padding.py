"""Where the records stand when the target is on each residue: the three paddings (SPEC §4).

`prefix` moves all records together; `insequence` draws the gaps between them anew in every replica, given where the
target is; `target` moves the target alone, in a slot of R − 1 spare tokens.
"""

from typing import Literal

import numpy as np
import scipy.stats

Protocol = Literal["prefix", "insequence", "target"]
PROTOCOLS: tuple[Protocol, ...] = ("prefix", "insequence", "target")


def place_records(
    protocol: Protocol,
    target: np.ndarray,
    rank: np.ndarray,
    *,
    records: int,
    length: int,
    slack: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Positions of the records' keys [n, R, m], in order, for target positions [n, R] of ranks [n].

    A record has `length` tokens; `slack` filler tokens stand before, between and after the records together.
    """
    place = {"prefix": _prefix, "insequence": _insequence, "target": _target}[protocol]
    return place(target, rank, records, length, slack, rng)


def _prefix(target, rank, records, length, slack, rng):
    """All records move together: [n, R, m]."""
    return target[..., None] + length * (np.arange(records) - rank[:, None, None])


def _target(target, rank, records, length, slack, rng):
    """The target moves alone, in a slot of R − 1 spare tokens; every other record stays where it is: [n, R, m]."""
    residues = target.shape[1]
    k = np.arange(records)
    start = target.min(axis=1)
    others = start[:, None] + length * (k - rank[:, None]) + (residues - 1) * (k > rank[:, None])
    return np.where(k == rank[:, None, None], target[..., None], others[:, None, :])


def _insequence(target, rank, records, length, slack, rng):
    """The gaps between records are drawn anew in every replica, given where the target is: [n, R, m].

    Before and after the target every way to spread the filler over the gaps is equally likely.
    """
    n, residues = target.shape
    rank = np.broadcast_to(rank[:, None], (n, residues))
    before_filler = target - 1 - length * rank
    before = _spread(rng, rank, before_filler, records, length)
    after = _spread(rng, records - 1 - rank, slack - before_filler, records, length)
    k = np.arange(records)
    # Records after the target count from the end of the target; their k-th is rank + 1 + k.
    shifted = np.take_along_axis(after, np.clip(k - rank[..., None] - 1, 0, records - 1), axis=2)
    position = np.where(k < rank[..., None], 1 + before, target[..., None] + length + shifted)
    return np.where(k == rank[..., None], target[..., None], position)


def _spread(rng, count: np.ndarray, filler: np.ndarray, most: int, length: int) -> np.ndarray:
    """Start of the k-th of `count` records among `filler` single tokens in random order, [..., most] (rest unused)."""
    units = int((count + filler).max())
    keys = rng.random((*count.shape, max(units, 1)))
    keys[np.arange(keys.shape[-1]) >= (count + filler)[..., None]] = np.inf
    chosen = np.argsort(keys, axis=-1)[..., :most].astype(np.int64)
    k = np.arange(chosen.shape[-1])
    chosen = np.sort(np.where(k < count[..., None], chosen, units), axis=-1)
    starts = chosen + (length - 1) * k
    return np.pad(starts, [(0, 0)] * count.ndim + [(0, most - starts.shape[-1])])


class DistractorDependence:
    """How the distractors' residues depend on the target's, added up over logical samples.

    `cramers_v`: association of the two residues over all distractors; 0 means that a target on any residue meets the
    same mix of distractor residues. `lockstep`: mean over distractors of |mean over replicas of exp(2πi·(distractor −
    target)/R)|²; 1 where a distractor moves with the target, about 1/R where it is redrawn, 0 where it stays.
    """

    def __init__(self, residues: int):
        self.residues = residues
        self._table = np.zeros((residues, residues), np.int64)  # target's residue, distractor's residue
        self._lockstep, self._distractors = 0.0, 0

    def add(self, position: np.ndarray, rank: np.ndarray) -> None:
        """Counts record positions [n, R, m] of target ranks [n]; target r is on residue r."""
        residues = self.residues
        distractor = np.arange(position.shape[2]) != rank[:, None]
        found = position.transpose(0, 2, 1)[distractor] % residues
        cell = found + residues * np.arange(residues)
        self._table += np.bincount(cell.ravel(), minlength=residues**2).reshape(residues, residues)
        turned = np.exp(2j * np.pi * np.arange(residues) / residues)[(found - np.arange(residues)) % residues]
        self._lockstep += float(np.sum(np.abs(turned.mean(axis=1)) ** 2))
        self._distractors += len(found)

    def report(self) -> dict:
        """Both measures; None where there was no distractor."""
        if not self._distractors:
            return {"cramers_v": None, "lockstep": None}
        met = self._table[:, self._table.any(axis=0)]
        return {
            "cramers_v": float(scipy.stats.contingency.association(met, method="cramer")),
            "lockstep": self._lockstep / self._distractors,
        }
