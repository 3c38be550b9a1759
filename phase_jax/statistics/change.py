"""What an intervention changes in a phase sweep: the same logical samples with and without it (SPEC section 7)."""

import numpy as np

from phase_jax.statistics.arrays import as_correct, fold, to_json
from phase_jax.statistics.bands import gap_change_interval
from phase_jax.statistics.bootstrap import resampled_sums
from phase_jax.statistics.comparison import compare


def relative_change(changed, clean) -> np.ndarray:
    """100 (A' - A) / A in percent for accuracies of equal shape; NaN where A is 0."""
    changed, clean = np.asarray(changed, np.float64), np.asarray(clean, np.float64)
    return np.divide(100 * (changed - clean), clean, out=np.full(changed.shape, np.nan), where=clean > 0)


def same_everywhere(values, *, replicates: int = 2000, seed: int = 0) -> float:
    """Bootstrap p value of "the columns of `values[N, R]` all have mean zero".

    The statistic is the sum of squares of the column means; rows are drawn again about those means, which is its
    distribution where they are zero.
    """
    values = np.asarray(values, np.float64)
    means = values.mean(axis=0)
    again = resampled_sums(values - means, replicates, seed) / len(values)
    # A hair of slack, so that rounding does not decide between equal numbers (as where all values are zero).
    as_large = (again.astype(np.float64) ** 2).sum(axis=1) >= (means**2).sum() * (1 - 1e-6)
    return float((1 + np.count_nonzero(as_large)) / (1 + replicates))


def loss_dependence(changed, clean, **draws) -> float:
    """p value of "as many points are lost at every residue", for `changed` and `clean` `[N, R]`."""
    lost = as_correct(clean).astype(np.float64) - as_correct(changed)
    return same_everywhere(lost - lost.mean(axis=1, keepdims=True), **draws)


def relative_dependence(changed, clean, **draws) -> float | None:
    """p value of "the same share is lost at every residue": A'_r = s A_r for one s and all r.

    None where nothing is right without the change. Rows enter by their influence on A'_r - s A_r, with s estimated from
    the pooled accuracies.
    """
    changed, clean = (as_correct(correct).astype(np.float64) for correct in (changed, clean))
    curve = clean.mean(axis=0)
    if curve.mean() == 0:
        return None
    left = changed - changed.mean() / clean.mean() * clean
    return same_everywhere(left - left.mean(axis=1, keepdims=True) * curve / curve.mean(), **draws)


def change_report(changed, clean, changed_nll, clean_nll, stride: int | None, *, replicates=2000, seed=0) -> dict:
    """What a change does to answers `[N, R]` and their NLL, paired over logical samples, ready for JSON.

    `relative_change` per residue is in percent, all else in fractions and nats; differences are changed minus clean.
    Intervals are at 95 %: percentile bootstrap over logical samples for the curve and for NLL, `compare`'s for mean and
    worst, `gap_change_interval` for the gap. `loss_by_phase` are the points lost, folded to the stride (or R), and
    `loss_phases` is how many phases carry them: exp of the entropy of their shares, gains counted as zero. Raises
    ValueError for unlike shapes.
    """
    draws = {"replicates": replicates, "seed": seed}
    paired = compare(changed, clean, **draws)
    changed, clean = as_correct(changed), as_correct(clean)
    rows, residues = clean.shape
    accuracy, before = changed.mean(axis=0), clean.mean(axis=0)
    nll = np.asarray(changed_nll, np.float64) - clean_nll
    sums = resampled_sums(np.hstack([changed, clean, nll.mean(axis=1, keepdims=True)]), replicates, seed) / rows
    curves = relative_change(sums[:, :residues], sums[:, residues : 2 * residues])
    # A residue whose accuracy is 0 in some resample has no bounded interval there.
    low, high = np.quantile(curves, [0.025, 0.975], axis=0)
    phases = stride or residues
    loss = fold(before - accuracy, phases)
    lost = np.maximum(loss, 0)
    shares = lost[lost > 0] / lost.sum()
    return to_json(
        {
            "accuracy": accuracy,
            "relative_change": relative_change(accuracy, before),
            "relative_low": low,
            "relative_high": high,
            "mean": paired.mean,
            "mean_interval": paired.mean_interval,
            "worst": paired.worst,
            "worst_interval": paired.worst_interval,
            "gap": paired.gap,
            "gap_interval": gap_change_interval(changed, clean, **draws),
            "nll": float(nll.mean()),
            "nll_interval": np.quantile(sums[:, -1], [0.025, 0.975]),
            "loss_by_phase": loss,
            "loss_phases": float(np.exp(-(shares * np.log(shares)).sum())) if shares.size else None,
            "p_loss": loss_dependence(changed, clean, **draws),
            "p_relative": relative_dependence(changed, clean, **draws),
        }
    )
