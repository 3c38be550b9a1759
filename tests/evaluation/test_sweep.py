"""The vmapped sweep against one forward pass a prompt and a softmax in numpy."""

import dataclasses

import jax
import numpy as np
import pytest

from phase_jax.data.prompts import phase_prompts
from phase_jax.data.vocabulary import Vocabulary
from phase_jax.evaluation import sweep as sweep_module
from phase_jax.evaluation.sweep import BATCH, score, sweep
from phase_jax.model import Transformer
from tests.model.tiny import draw_params, tiny_config

VOCABULARY = Vocabulary(6)
N = BATCH + 3  # the second batch is a partial one


def prompts_of(n):
    return phase_prompts(VOCABULARY, "insequence", n, length=50, records=4, demonstrations=3, seed=0, residues=8)


@pytest.fixture(scope="module", params=["kvc_w4s4_1kv", "full_attn_1kv"])
def swept(request):
    """(model, params, prompts, scores, compilations that the sweep took)."""
    config = tiny_config(request.param, layers=1, vocabulary=VOCABULARY.size)
    model, params, prompts = Transformer(config), draw_params(config), prompts_of(N)
    # Larger logits, so that probabilities differ and some prompts are right by chance.
    params = {**params, "final_norm": 4 * params["final_norm"]}
    before = score._cache_size()
    scores = sweep(model, params, prompts, VOCABULARY, "test")
    return model, params, prompts, scores, score._cache_size() - before


def test_scores_equal_one_forward_pass_a_prompt(swept):
    model, params, prompts, scores, _ = swept
    forward = jax.jit(lambda tokens: model.apply({"params": params}, tokens))
    for i, answer in enumerate(prompts.answer):
        for r in range(8):
            logits = np.float64(forward(prompts.tokens[i, r][None])[0, -1])
            probabilities = np.exp(logits - logits.max())
            probabilities /= probabilities.sum()
            of_names = probabilities[VOCABULARY.first_name : VOCABULARY.first_name + VOCABULARY.words]
            assert scores["correct"][i, r] == (probabilities.argmax() == answer)
            assert scores["correct_of_names"][i, r] == (of_names.argmax() == answer - VOCABULARY.first_name)
            assert scores["gold_probability"][i, r] == pytest.approx(probabilities[answer], rel=1e-4)
            assert scores["nll"][i, r] == pytest.approx(-np.log(probabilities[answer]), rel=1e-4, abs=1e-5)
    assert 0 < scores["correct_of_names"].mean() < 1, "both outcomes must occur, or nothing was compared"


def test_every_prompt_is_scored_once(swept):
    *_, prompts, scores, _ = swept
    assert {name: values.shape for name, values in scores.items()} == dict.fromkeys(
        ("correct", "correct_of_names", "gold_probability", "nll", "target_position"), (N, 8)
    )
    assert scores["correct"].dtype == bool
    np.testing.assert_array_equal(scores["target_position"], prompts.target_position)


def test_the_whole_sweep_compiles_once(swept):
    assert swept[-1] == 1


def test_the_order_of_samples_is_kept(swept):
    model, params, prompts, scores, _ = swept
    order = np.random.default_rng(0).permutation(N)
    arrays = {field: getattr(prompts, field)[order] for field in ("tokens", "answer", "target_position")}
    again = sweep(model, params, dataclasses.replace(prompts, **arrays), VOCABULARY, "test")
    for name, values in scores.items():
        np.testing.assert_allclose(again[name], values[order], rtol=1e-5, atol=1e-6, err_msg=name)


def test_fewer_samples_than_a_batch(swept):
    model, params, prompts, scores, _ = swept
    few = dataclasses.replace(
        prompts,
        tokens=prompts.tokens[:2],
        answer=prompts.answer[:2],
        target_position=prompts.target_position[:2],
    )
    np.testing.assert_allclose(sweep(model, params, few, VOCABULARY, "test")["nll"], scores["nll"][:2], rtol=1e-5)


def test_only_last_position_logits_are_formed(swept):
    """Nothing as large as the logits of every position exists in the compiled program."""
    model, params, prompts, *_ = swept
    tokens, answer = prompts.tokens[:BATCH], prompts.answer[:BATCH]
    program = sweep_module.score.lower(model, VOCABULARY, params, tokens, answer).as_text()
    length, vocabulary = tokens.shape[-1], VOCABULARY.size
    assert f"x{vocabulary}xf32" in program and f"x{length}x{vocabulary}xf32" not in program
