"""A model's 24-residue curve with the kernels is the reference's, and what differs does not depend on the phase."""

import pytest

from experiments.kernel_curve import NO_KERNEL, compare
from phase_jax.data.prompts import phase_prompts
from phase_jax.model import Transformer
from tests.model.tiny import draw_params
from tests.runs import tiny_run


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["kvc_w8s4", "kvc_w8s8_1kv_vector"])
def test_a_curve_with_the_kernels_is_the_curve(variant):
    run, params = tiny_run(variant), draw_params(tiny_run(variant).model)
    prompts = phase_prompts(run.data.vocabulary, "prefix", 24, **run.data.prompt_sizes, seed=3)
    rows = list(compare(Transformer(run.model), params, prompts, run.data.vocabulary))
    assert [row["kernels"] for row in rows] == [NO_KERNEL, "gating", "attention", "both"]
    assert rows[-1]["logit"] > 0, "the two were computed alike"
    for row in rows:
        assert max(row[name] for name in ("correct", "gold_probability", "nll")) < 1e-3
        assert row["logit"] < 1e-3
        assert row["kernels"] == NO_KERNEL or row["p_sign"] > 0.001
