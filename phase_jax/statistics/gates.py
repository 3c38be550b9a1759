"""How concentrated gate weights are, and whether losses fall where gates are open (SPEC §7)."""

import numpy as np
from scipy import special, stats

# A head is statically concentrated when its key gate covers fewer offsets than this share of W. In the published models
# it sets nine heads of fifty-six apart.
CONCENTRATED = 0.8
_EXACT = 50_000  # permutations: all 8! = 40,320 of eight phases, and a random choice of more


def effective_offsets(gates, axis: int = -1) -> np.ndarray:
    """exp(H) of weights that sum to 1 along `axis`: 1 where one offset has all, W where all have alike."""
    return np.exp(special.entr(np.asarray(gates, np.float64)).sum(axis=axis))


def gate_profile(mass, phases, stride: int) -> np.ndarray:
    """Gate profile g(r) `[..., S]`: the mass at phase r over its uniform share.

    `mass[..., W]` are mean weights, `phases[W]` the phase of every offset. 1 everywhere is a uniform gate.
    """
    mass, member = np.asarray(mass, np.float64), np.equal.outer(np.asarray(phases), np.arange(stride))
    return mass @ member / (member.sum(axis=0) / len(member))


def best_shift(key, value) -> int:
    """The offsets by which mean weights `key[W]` have to move to lie on `value[W]` best: the d of the largest
    Σ_i key_i · value_{i+d}.

    Where gates favour two neighbours alike, it is sure and the distance of the peaks is not.
    """
    return int(np.correlate(value, key, "full").argmax()) - (len(key) - 1)


def alignment(profile, loss) -> dict:
    """Spearman correlation of `profile[S]` and `loss[S]`, and the two-sided p value of pairing phases at random.

    All pairings are tried up to eight phases, 50,000 of them beyond. Both are None where a phase's loss is unknown
    (None or NaN), or where either is the same at all phases.
    """
    profile, loss = np.asarray(profile, np.float64), np.array(loss, np.float64)
    if not np.isfinite(loss).all() or np.ptp(profile) == 0 or np.ptp(loss) == 0:
        return {"correlation": None, "p_value": None}
    first, second = (stats.zscore(stats.rankdata(values)) for values in (profile, loss))
    result = stats.permutation_test(
        (first,),
        lambda x, axis=-1: (x * second).mean(axis=axis),
        permutation_type="pairings",
        n_resamples=_EXACT,
        vectorized=True,
        rng=0,
    )
    return {"correlation": float(result.statistic), "p_value": float(result.pvalue)}
