"""Greedy decoding against a forward pass over everything, again for every token."""

import numpy as np
import pytest

from phase_jax.errors import UserError
from phase_jax.evaluation.decode import greedy, is_right
from phase_jax.model import Transformer
from tests.model.tiny import draw_params, tiny_config


def test_greedy_decoding_takes_the_most_likely_token_each_time():
    config = tiny_config("kvc_w8s4_dsv4kernel_1kv_scalar_rope16", layers=1)
    model, params = Transformer(config), draw_params(config)
    prompts = np.random.default_rng(0).integers(0, config.vocabulary, (3, 14))
    made = greedy(model, params, prompts, 11, chunk=9)
    # One pass over prompt and answer is enough: nothing depends on a later token.
    logits = model.apply({"params": params}, np.concatenate([prompts, made], axis=1))
    np.testing.assert_array_equal(made, np.argmax(logits[:, 13:-1], axis=-1))
    assert len(np.unique(made)) > 1


@pytest.mark.parametrize(
    ("generated", "gold", "right"),
    [
        (" 4711\n", "4711", True),
        ("\t4711, and more", " 4711 ", True),
        ("471", "4711", False),
        ("is 4711", "4711", False),
        ("", "4711", False),
    ],
)
def test_an_answer_is_right_if_it_starts_with_the_gold_value(generated, gold, right):
    assert is_right(generated, gold) is right


def test_bad_input_is_refused():
    with pytest.raises(UserError, match="gold value is empty"):
        is_right("anything", " ")
    with pytest.raises(UserError, match="at least one"):
        greedy(None, {}, np.zeros((1, 3), int), 0)
