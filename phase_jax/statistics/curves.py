"""The plain numbers of one accuracy curve: mean, worst, gap, spread (SPEC section 6)."""

import numpy as np


def summarise(accuracy) -> dict:
    """Mean, worst (and where), gap = max - min, sigma and gap / mean of a curve `[R]` of fractions.

    `normalised_gap` is None where the mean is 0: there it has no meaning.
    """
    accuracy = np.asarray(accuracy, np.float64)
    mean, gap = float(accuracy.mean()), float(np.ptp(accuracy))
    return {
        "mean": mean,
        "worst": float(accuracy.min()),
        "worst_residue": int(accuracy.argmin()),
        "gap": gap,
        "sigma": float(accuracy.std()),
        "normalised_gap": gap / mean if mean > 0 else None,
    }
