"""The completion flip: periods that are known, periods that are not there, and a model against plain forward passes."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from phase_jax.data.completion import completion_prompts
from phase_jax.data.tokenizers import ByteTokenizer
from phase_jax.evaluation import flip
from phase_jax.evaluation.flip import completion_flip, model_scorer
from phase_jax.model import Transformer
from tests.model.tiny import draw_params, tiny_config

LENGTHS = range(24, 40)


def prompts_of(lengths=LENGTHS, **changes):
    return completion_prompts(ByteTokenizer(), "# {filler}\nbits = ", "64", "8", lengths=lengths, **changes)


def scorer_of(odds_at, seed=0, noise=0.0):
    """A scorer whose log-odds are a function of where the code begins, read from the ids, and noise."""
    rng = np.random.default_rng(seed)

    def scorer(prompts):
        rows = [ids[:start] for (ids, _), start in zip(prompts.tokens, prompts.start, strict=True)]
        code = np.array([row.tolist().index(ord("\n")) for row in rows])
        odds = odds_at(code) + noise * rng.standard_normal(len(code))
        return np.stack([-np.logaddexp(0, -odds), -np.logaddexp(0, odds)], axis=1)

    return scorer


@pytest.mark.parametrize("period", [2, 3, 4, 6, 8])
def test_a_known_period_is_found(period):
    shape = np.random.default_rng(period).permutation(np.linspace(-3, 3, period))
    lengths = range(24, 24 + max(16, 4 * period))
    scorer = scorer_of(lambda code: shape[code % period] + 0.02 * code, noise=0.5)
    report = completion_flip(prompts_of(lengths), scorer)
    assert report["period"] == period
    assert [family["period"] for family in report["families"]].count(period) >= 2
    assert 0 < report["p_value"] < 0.05


def test_periods_are_rarely_found_where_there_are_none():
    prompts = prompts_of()
    drifts = (lambda code: 0.0 * code, lambda code: 0.02 * (code - 24.0) ** 2, lambda code: np.tanh((code - 33.0) / 3))
    found = [
        completion_flip(prompts, scorer_of(drifts[seed % 3], seed=seed, noise=1.0))["period"] for seed in range(150)
    ]
    # At a level of 5 %, 150 draws give more than 15 alarms once in 300 times.
    assert sum(period is not None for period in found) <= 15


def test_a_constant_preference_has_no_period():
    report = completion_flip(prompts_of(), scorer_of(lambda code: 2.0 + 0.0 * code))
    assert report["period"] is report["p_value"] is report["groups"] is report["following"] is None
    assert (report["rankings"], report["wrong"]) == (64, 0)


def test_groups_and_rankings_are_those_of_the_definition():
    """Two phases of four prefer the right one, with four exceptions: as published for DeepSeek-V4-Flash-Base."""
    prompts = prompts_of()
    lengths = np.tile(np.array(LENGTHS), 4)
    prefers = np.isin(lengths % 4, (2, 3))
    exceptions = [3, 20, 41, 62]
    prefers[exceptions] = ~prefers[exceptions]
    right = np.where(prefers, 0.9, 0.25)
    report = completion_flip(prompts, lambda _: np.log(np.stack([right, 0.97 - right], axis=1)))
    assert (report["period"], report["following"], report["rankings"]) == (4, 60, 64)
    assert report["wrong"] == (~prefers).sum()
    assert report["difference"] == pytest.approx([0.5 - 0.97, 1.8 - 0.97])
    odds = np.log(right / (0.97 - right)).reshape(4, 16).mean(axis=0)
    assert report["odds_range"] == pytest.approx([odds.min(), odds.max()])
    within = sum(((odds[p::4] - odds[p::4].mean()) ** 2).sum() for p in range(4))
    assert report["explained"] == pytest.approx(1 - within / ((odds - odds.mean()) ** 2).sum())
    assert 0.8 < report["explained"] < 1
    by_name = {group["prefers"]: group for group in report["groups"]}
    assert by_name["right"]["phases"] == [2, 3] and by_name["wrong"]["phases"] == [0, 1]
    for name, phases in (("right", (2, 3)), ("wrong", (0, 1))):
        expected = np.mean([p for p, length in zip(right, lengths, strict=True) if length % 4 in phases])
        assert by_name[name]["right"] == pytest.approx(expected)
        assert by_name[name]["wrong"] == pytest.approx(0.97 - expected)
    assert json.loads(json.dumps(report, allow_nan=False)) == report


@pytest.mark.parametrize("variant", ["kvc_w8s4", "full_attn_1kv"])
def test_a_model_scores_whole_continuations_whatever_is_behind_them(variant):
    config = dataclasses.replace(tiny_config(variant, layers=1), vocabulary=ByteTokenizer.size)
    model, params = Transformer(config), draw_params(config)
    prompts = prompts_of(range(3, 19), fillers=("equals", "mixed"))
    before = flip.score._cache_size()
    found = model_scorer(model, params, "test")(prompts)
    assert flip.score._cache_size() - before == 1, "one compilation serves all lengths"
    forward = jax.jit(lambda ids: model.apply({"params": params}, ids[None])[0])
    for row, side in ((0, 0), (21, 1)):
        start, count = prompts.start[row], prompts.count[side]
        ids = prompts.tokens[row, side, : start + count]
        logits = np.float64(forward(ids))
        log_softmax = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        expected = sum(log_softmax[t - 1, ids[t]] for t in range(start, start + count))
        assert found[row, side] == pytest.approx(expected, rel=1e-5)
    assert len(np.unique(found)) == found.size
