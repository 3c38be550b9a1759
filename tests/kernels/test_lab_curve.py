"""A model's 24-residue curve with the kernels is the reference's, and what differs does not depend on the phase."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import request
from phase_jax.data.prompts import phase_prompts
from phase_jax.evaluation.sweep import score
from phase_jax.model import Transformer
from phase_jax.statistics.hypothesis_tests import permutation_test
from tests.model.tiny import draw_params
from tests.runs import tiny_run


def scores_by_form(run, params, samples, batch=12):
    """The sweep's scores [n, 24] by XLA, and by the kernels, interpreted."""
    data, model = run.data, Transformer(run.model)
    prompts = phase_prompts(data.vocabulary, "prefix", samples, **data.prompt_sizes, seed=3)

    def all_scores():
        parts = [
            jax.device_get(
                score(model, data.vocabulary, params, jnp.asarray(prompts.tokens[at]), jnp.asarray(prompts.answer[at]))
            )
            for at in (slice(start, start + batch) for start in range(0, samples, batch))
        ]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    reference = all_scores()
    with request("pallas", interpret=True):
        return reference, all_scores()


def assert_curves_agree(reference, kernels):
    for name in ("correct", "gold_probability", "nll"):
        by_residue = [np.asarray(scores[name], float).mean(axis=0) for scores in (reference, kernels)]
        np.testing.assert_allclose(*by_residue, atol=1e-3)
    error = np.abs(reference["nll"] - kernels["nll"])
    assert 0 < error.max() < 1e-3, "the two were computed alike, or not alike at all"
    # Whether an error is one of the larger half of its sample's: would a residue have more of them?
    assert permutation_test(error > np.median(error, axis=1, keepdims=True), permutations=2000) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["kvc_w8s4", "kvc_w8s8_1kv_vector"])
def test_a_curve_with_the_kernels_is_the_curve(variant):
    run = tiny_run(variant)
    assert_curves_agree(*scores_by_form(run, draw_params(run.model), 24))
