"""Distance prompts read back from their ids, and measurements against a forward pass for each prompt."""

import json

import jax
import numpy as np
import pytest

from phase_jax.data.vocabulary import Vocabulary
from phase_jax.errors import UserError
from phase_jax.evaluation.distance import PARTS, distance_prompts, distance_report, measure, target_parts
from phase_jax.geometry import Windows
from phase_jax.model import Transformer
from phase_jax.reports.figures import distance_figure
from tests.model.tiny import draw_params, tiny_config

VOCABULARY = Vocabulary(8)


def test_only_the_target_moves_and_every_phase_is_met():
    prompts = distance_prompts(VOCABULARY, 5, length=40, records=6, seed=0)
    assert prompts.distance.tolist() == list(range(3, 29))
    for sample, answer in zip(prompts.tokens, prompts.answer, strict=True):
        rest = set()
        for tokens, distance in zip(sample, prompts.distance, strict=True):
            key = 39 - distance
            assert tokens[0] == VOCABULARY.bos and tokens[-2] == VOCABULARY.query_mark
            assert tokens[key] == tokens[-1] and tokens[key + 1] == answer
            assert (tokens == tokens[-1]).sum() == 2, "the target's animal occurs once before the query"
            rest.add(tuple(tokens[:11]))
            assert set(np.delete(tokens, [key, key + 1, 38, 39])[11:]) <= {VOCABULARY.filler}
        assert len(rest) == 1, "the other records stay where they are"
    for stride in (4, 6, 8):
        phases = prompts.target_position % stride
        assert all(set(phases[i : i + stride]) == set(range(stride)) for i in range(len(phases) - stride + 1))


def test_target_parts_follow_the_definition():
    windows = Windows(8, 6, -2)
    entries, tokens = target_parts(windows, np.array([3, 9]), 24)
    for position, own_entries, own_tokens in zip((3, 9), entries, tokens, strict=True):
        assert np.flatnonzero(own_tokens).tolist() == [position, position + 1]
        holds = [start < position + 2 and position < start + 8 for start in windows.starts(24)]
        assert own_entries.tolist() == holds


@pytest.mark.parametrize("variant", ["kvc_w4s4_1kv", "full_attn_1kv"])
def test_measurements_equal_one_forward_pass_for_each_prompt(variant):
    config = tiny_config(variant, layers=2, exact_width=5)
    model, params = Transformer(config), draw_params(config)
    prompts = distance_prompts(VOCABULARY, 5, length=24, records=3, seed=1)  # 5: the last batch is filled up
    scores = measure(model, params, prompts, variant)
    flat = prompts.tokens.reshape(-1, 24)
    logits = np.asarray(jax.jit(model.apply)({"params": params}, flat))[:, -1].reshape(5, len(prompts.distance), -1)
    np.testing.assert_array_equal(scores["correct"], logits.argmax(axis=-1) == prompts.answer[:, None])
    gold = np.take_along_axis(jax.nn.softmax(logits), prompts.answer[:, None, None], axis=-1)[..., 0]
    np.testing.assert_allclose(scores["gold_probability"], gold, rtol=1e-4)

    mass = dict(zip(PARTS, scores["mass"], strict=True))
    np.testing.assert_allclose(mass["entries"] + mass["exact"], 1, rtol=1e-5)
    outside = prompts.distance >= (5 if config.windows else 99) + 1
    assert (mass["exact_of_target"][outside] == 0).all(), "the exact window of 5 no longer holds the target"
    inside = prompts.distance <= 4
    assert (mass["exact_of_target"][inside] > 0).all()
    if config.windows is None:
        assert (mass["entries"] == 0).all()
    else:
        # The window of a target that is still open has no entry: the query at 23 closes the one of positions 20 to 23.
        assert (mass["entries_of_target"] > 0).all()

    report = json.loads(json.dumps(distance_report(scores, config), allow_nan=False))
    assert report["query_position"] == 23
    assert np.shape(report["mass"]["entries"]) == (2, len(prompts.distance))
    curve, *maps = distance_figure(report).axes
    np.testing.assert_array_equal(curve.lines[-1].get_xydata().T, [report["distance"], report["accuracy"]])
    drawn = [axes.collections[0].get_array() for axes in maps if axes.get_title(loc="left")]
    wanted = ["entries", "entries_of_target", "exact_of_target"] if config.windows else ["exact_of_target"]
    np.testing.assert_array_equal(drawn, [report["mass"][part] for part in wanted])
    first = report["bands"][0]
    assert first["distances"] == [3, 6 if config.windows else 10]
    if config.windows:
        for distance, phase, accuracy in zip(report["distance"][:4], report["phase"], report["accuracy"], strict=False):
            assert phase == (23 - distance) % 4 and first["accuracy_by_phase"][phase] == accuracy
    else:
        assert first["accuracy_by_phase"] is None


def test_impossible_sizes_are_refused():
    with pytest.raises(UserError, match="too short for 8 records"):
        distance_prompts(VOCABULARY, 1, length=18, records=8, seed=0)
    with pytest.raises(UserError, match="at least one logical sample"):
        distance_prompts(VOCABULARY, 0, length=40, records=6, seed=0)
