"""A model's 24-residue curve with the kernels, interpreted, beside plain JAX's; and whether their error has a phase."""

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

KERNELS = {"gating": ("windowed_gating",), "attention": ("joint_attention",), "both": None}
BATCH = 8


def compare(model: Transformer, params: dict, prompts: PhasePrompts, vocabulary: Vocabulary) -> Iterator[dict]:
    """A row for each choice of kernels: the largest difference over residues of accuracy, mean probability of the
    answer and mean NLL; the largest error of any logit; and `p` that the error of the logits knows no residue."""

    @jax.jit
    def last_logits(params, tokens):
        apply = partial(model.apply, {"params": params})

        def one(tokens):
            # Every layer of every position: with `last_only` the last layer would take a form of its own, no kernel.
            return apply(apply(tokens, method="hidden_states")[:, -1], method="logits")

        return jax.vmap(one, in_axes=1, out_axes=1)(tokens)

    def logits():
        starts = range(0, len(prompts.tokens), BATCH)
        return np.concatenate([last_logits(params, prompts.tokens[start : start + BATCH]) for start in starts])

    def by_residue(logits):
        scores = scores_of(logits, prompts.answer[:, None], vocabulary)
        return {name: np.asarray(values, np.float64).mean(axis=0) for name, values in scores.items()}

    plain = logits()
    reference = by_residue(plain)
    for name, kernels in KERNELS.items():
        with request("pallas", interpret=True, kernels=kernels):
            found = logits()
        error = np.sqrt(((found - plain).astype(np.float64) ** 2).mean(axis=-1))
        # One of the larger half of its sample's: would a residue have more of them?
        p = permutation_test(error > np.median(error, axis=1, keepdims=True))
        largest = {key: float(np.abs(values - reference[key]).max()) for key, values in by_residue(found).items()}
        yield {"kernels": name, "samples": len(found), **largest, "logit": float(np.abs(found - plain).max()), "p": p}


def line(row: dict) -> str:
    """A row for people."""
    return (
        f"{row['kernels']}, {row['samples']} samples: largest difference in any residue: accuracy {row['correct']:.1e},"
        f" probability {row['gold_probability']:.1e}, NLL {row['nll']:.1e}; of any logit {row['logit']:.1e}; does the"
        f" error of the logits know the residue: p = {row['p']:.2g}"
    )
