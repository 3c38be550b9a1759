"""Is there any phase effect at all? Tests within rows, the verdict, and Holm's adjustment over models."""

import numpy as np

from phase_jax.statistics.arrays import as_correct


def permutation_test(correct, *, permutations: int = 10_000, seed: int = 0) -> float:
    """Monte Carlo p value of "the residue does not matter" for `correct[N, R]`.

    Under that hypothesis the R answers of a logical sample may be shuffled within its row. The statistic is
    the variance of the column sums (given the rows it orders as Cochran's Q does); p = (1 + #{as large}) /
    (1 + B).
    """
    correct = as_correct(correct)
    observed = _spread(correct.sum(axis=0)[None])[0]
    shuffled = _spread(_shuffled_column_sums(correct.sum(axis=1), correct.shape[1], permutations, seed))
    return float((1 + np.count_nonzero(shuffled >= observed)) / (1 + permutations))


def cochran_q(correct) -> tuple[float, float]:
    """Cochran's Q and its chi-squared p value; (0, 1) where every row is all right or all wrong."""
    from statsmodels.stats.contingency_tables import cochrans_q

    correct = as_correct(correct)
    mixed = correct.any(axis=1) & ~correct.all(axis=1)
    if not mixed.any():
        return 0.0, 1.0
    result = cochrans_q(correct.astype(np.int64))
    return float(result.statistic), float(result.pvalue)


def verdict(p_value: float, gap_high: float, *, smallest_gap: float = 0.10, alpha: float = 0.05) -> str:
    """`sensitive` if p < alpha; else `not seen` if gap_high < smallest_gap; else `undecided`."""
    if p_value < alpha:
        return "sensitive"
    return "not seen" if gap_high < smallest_gap else "undecided"


def holm(p_values) -> np.ndarray:
    """Holm's adjusted p values over several models, in the order given."""
    from statsmodels.stats.multitest import multipletests

    p_values = np.asarray(p_values, np.float64)
    return multipletests(p_values, method="holm")[1] if p_values.size else p_values


def _spread(column_sums) -> np.ndarray:
    """R^2 times the variance over columns, in exact integers: ties must compare as ties."""
    sums = column_sums.astype(np.int64)
    return sums.shape[1] * (sums**2).sum(axis=1) - sums.sum(axis=1) ** 2


def _shuffled_column_sums(row_sums, residues: int, permutations: int, seed: int) -> np.ndarray:
    """Column sums `[permutations, R]` after every row was shuffled by itself.

    Rows with equally many ones are alike, so only how many rows have j ones left is followed, column by
    column: a row with j ones left for m columns has a one in the next column with probability j / m. That
    draws from exactly the distribution of shuffled rows, at a cost that does not grow with their number.
    """
    rng = np.random.default_rng(seed)
    left = np.tile(np.bincount(row_sums, minlength=residues + 1), (permutations, 1))
    ones_left = np.arange(residues + 1)
    sums = np.empty((permutations, residues), np.int64)
    for column in range(residues):
        chance = np.minimum(ones_left / (residues - column), 1.0)
        drawn = rng.binomial(left, chance)
        sums[:, column] = drawn.sum(axis=1)
        left = left - drawn
        left[:, :-1] += drawn[:, 1:]
    return sums
