"""A model's 24-residue curve with the kernels, interpreted, beside plain JAX's; and whether their error has a phase.

A network makes more of any rounding in some residues than in others, kernels or not: a first row says so, of no kernel
and of weights that are off by half a unit of their last place. A kernel that made a phase would move the likelihood of
the answers up in some residues and down in others: that is what is tested.
"""

from collections.abc import Iterator
from functools import partial

import jax
import numpy as np

from pallas_kernels import request
from phase_jax.data.prompts import PhasePrompts
from phase_jax.data.vocabulary import Vocabulary
from phase_jax.evaluation.sweep import scores_of
from phase_jax.model import Transformer
from phase_jax.statistics.hypothesis_tests import permutation_test

NO_KERNEL = "weights rounded otherwise"
KERNELS = {"gating": ("windowed_gating",), "attention": ("joint_attention",), "both": None}
BATCH = 8


def compare(model: Transformer, params: dict, prompts: PhasePrompts, vocabulary: Vocabulary) -> Iterator[dict]:
    """A row of `NO_KERNEL`, and one for each choice of kernels: the largest difference over residues of accuracy, mean
    probability of the answer and mean NLL; the largest error of any logit; `p_size`, that the size of the logits'
    error knows no residue, and `p_sign`, that the sign of the NLL's does not."""

    @jax.jit
    def last_logits(params, tokens):
        apply = partial(model.apply, {"params": params})

        def one(tokens):
            # Every layer of every position: with `last_only` the last layer would take a form of its own, no kernel.
            return apply(apply(tokens, method="hidden_states")[:, -1], method="logits")

        return jax.vmap(one, in_axes=1, out_axes=1)(tokens)

    def logits(params=params):
        starts = range(0, len(prompts.tokens), BATCH)
        return np.concatenate([last_logits(params, prompts.tokens[start : start + BATCH]) for start in starts])

    def by_residue(logits):
        scores = scores_of(logits, prompts.answer[:, None], vocabulary)
        return {name: np.asarray(values, np.float64).mean(axis=0) for name, values in scores.items()}

    def nll(logits):  # in f64, so that no two are alike by rounding
        logits = logits.astype(np.float64)
        gold = np.take_along_axis(logits, np.asarray(prompts.answer)[:, None, None], axis=-1)[..., 0]
        return np.logaddexp.reduce(logits, axis=-1) - gold

    def row(name, found):
        error = np.sqrt(((found - plain).astype(np.float64) ** 2).mean(axis=-1))
        largest = {key: float(np.abs(values - reference[key]).max()) for key, values in by_residue(found).items()}
        return {
            **{"kernels": name, "samples": len(found), **largest, "logit": float(np.abs(found - plain).max())},
            # One of the larger half of its sample's: would a residue have more of them?
            "p_size": permutation_test(error > np.median(error, axis=1, keepdims=True)),
            "p_sign": permutation_test(nll(found) > nll(plain)),
        }

    plain = logits()
    reference = by_residue(plain)
    yield row(NO_KERNEL, logits(_rounded_otherwise(params)))
    for name, kernels in KERNELS.items():
        with request("pallas", interpret=True, kernels=kernels):
            found = logits()
        yield row(name, found)


def _rounded_otherwise(params: dict) -> dict:
    """The parameters times 1 + ε, ε normal of standard deviation 2⁻²⁴."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: np.asarray(x * (1 + 2**-24 * rng.standard_normal(x.shape)), x.dtype), params)


def line(row: dict) -> str:
    """A row for people."""
    return (
        f"{row['kernels']}, {row['samples']} samples: largest difference in any residue: accuracy {row['correct']:.1e},"
        f" probability {row['gold_probability']:.1e}, NLL {row['nll']:.1e}; of any logit {row['logit']:.1e}; does the"
        f" error know the residue, its size: p = {row['p_size']:.2g}, its sign: p = {row['p_sign']:.2g}"
    )
