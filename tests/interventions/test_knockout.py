"""Knockouts from one prefill against whole forward passes, which the float64 loop vouches for."""

import dataclasses

import jax
import numpy as np
import pytest

from phase_jax.data.prompts import PhasePrompts
from phase_jax.data.vocabulary import Vocabulary
from phase_jax.errors import UserError
from phase_jax.interventions.knockout import (
    Knockout,
    calibrate,
    check_disjoint,
    digest,
    knock_out,
    knockout_report,
    knockouts,
    measure,
    parse_heads,
)
from phase_jax.model import Heads, Intervention, Transformer
from tests.model.tiny import draw_params, tiny_config

WORDS = Vocabulary(8)
SAMPLES, RESIDUES, BAND = 3, 4, 3
KINDS = {
    "overlap, two KV heads": tiny_config("kvc_w8s6", kv_heads=2, query_heads=4, layers=3),
    "half-empty first window, tied": tiny_config("kvc_w8s4_dsv4kernel_1kv_rope16"),
    "full": tiny_config("full_attn_1kv"),
}
LENGTH = 20  # the last token closes an entry of W8/S6 and of the origin −4


def made_up_prompts(seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, WORDS.size, (SAMPLES, RESIDUES, LENGTH)).astype(np.int32)
    answer = rng.integers(0, WORDS.size, SAMPLES).astype(np.int32)
    nothing = np.zeros((SAMPLES, RESIDUES), int)
    return PhasePrompts(tokens, answer, nothing[..., None], nothing, nothing[:, 0], {})


@pytest.mark.parametrize("kind", KINDS)
def test_knockouts_equal_whole_forward_passes(kind):
    config = dataclasses.replace(KINDS[kind], vocabulary=WORDS.size)
    if config.windows:
        assert LENGTH - 1 in config.windows.closes(LENGTH)
    model, params = Transformer(config), draw_params(config)
    prompts = made_up_prompts()
    everything = "+".join(f"{layer}.{head}" for layer in range(config.layers) for head in range(config.kv_heads))
    plan = knockouts(config, LENGTH, [parse_heads(everything, config)], BAND, controls=1)
    plan.append(Knockout("nothing", "set", np.zeros((config.layers, config.query_heads), bool)))
    shape = (config.layers, RESIDUES, BAND, config.query_heads, config.head_dim)
    means = np.random.default_rng(5).normal(size=shape).astype(np.float32)  # others at every residue
    scores = measure(model, params, prompts, WORDS, plan, means, "test")
    assert scores["nll"].shape == (SAMPLES, 1 + len(plan), RESIDUES)

    @jax.jit
    def passed(where, value):
        change = Intervention(Heads(where, value))
        logits = model.apply({"params": params}, prompts.tokens.reshape(-1, LENGTH), last_only=True, change=change)
        return jax.nn.log_softmax(logits).reshape(SAMPLES, RESIDUES, -1)

    def nll(knockout):
        where = np.zeros((config.layers, 1, LENGTH, config.query_heads), bool)
        where[:, :, LENGTH - knockout.band :] = knockout.where[:, None, None]
        value = np.zeros((config.layers, RESIDUES, LENGTH, *shape[3:]), np.float32)
        value[:, :, LENGTH - knockout.band :] = means[:, :, BAND - knockout.band :]
        found = passed(where, np.tile(value, (1, SAMPLES, 1, 1, 1)))
        return -np.take_along_axis(np.asarray(found), prompts.answer[:, None, None], axis=2)[..., 0]

    clean = nll(plan[-1])
    np.testing.assert_allclose(scores["nll"][:, 0], clean, rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(scores["nll"][:, -1], scores["nll"][:, 0], "no head, no change")
    for place, knockout in enumerate(plan[:-1]):
        expected = nll(knockout)
        np.testing.assert_allclose(scores["nll"][:, 1 + place], expected, rtol=2e-5, atol=2e-5, err_msg=knockout.name)
        assert np.abs(expected - clean).max() > 1e-2, f"{knockout.name} changes nothing: nothing was tested"


def test_means_are_what_heads_say_on_average():
    config = dataclasses.replace(KINDS["full"], vocabulary=WORDS.size)
    model, params = Transformer(config), draw_params(config)
    prompts = made_up_prompts(1)
    _, left = jax.jit(lambda tokens: model.apply({"params": params}, tokens, mutable="intermediates"))(
        prompts.tokens.reshape(-1, LENGTH)
    )
    said = np.asarray(left["intermediates"]["layers"]["attention"]["heads"][0])[:, :, -BAND:]
    said = said.reshape(config.layers, SAMPLES, RESIDUES, BAND, config.query_heads, config.head_dim)
    overall = calibrate(model, params, prompts, BAND, 1, "test")
    np.testing.assert_allclose(overall[:, 0], said.mean(axis=(1, 2)), rtol=1e-4, atol=1e-5)
    by_phase = calibrate(model, params, prompts, BAND, 2, "test")
    for phase in range(2):
        np.testing.assert_allclose(by_phase[:, phase], said[:, :, phase::2].mean(axis=(1, 2)), rtol=1e-4, atol=1e-5)


def test_a_knockout_is_of_the_query_heads_that_read_the_kv_head():
    config = tiny_config("kvc_w8s8_4kv", query_heads=8, layers=3)
    found = knock_out(parse_heads("2.3+0.1", config), config)
    assert (found.name, found.kind, found.first) == ("0.1+2.3", "set", 0)
    assert np.argwhere(found.where).tolist() == [[0, 2], [0, 3], [2, 6], [2, 7]]
    plan = knockouts(config, 20, [parse_heads("1.0+1.1", config)], band=4, controls=2)
    assert [knockout.kind for knockout in plan] == ["head"] * 12 + ["set"] + ["layer"] * 3 + ["control"] * 4
    assert sum(knockout.where for knockout in plan[:12]).tolist() == np.ones((3, 8), int).tolist()
    assert [int(knockout.where.sum()) for knockout in plan[12:]] == [4, 8, 8, 8, 2, 2, 4, 4]
    assert {knockout.band for knockout in plan if knockout.kind == "layer"} == {4}


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ("2.0", "no head 2.0: layers are 0 to 1, KV heads 0 to 1"),
        ("0.2", "no head 0.2"),
        ("0.0+9.9", "no head 9.9"),
        ("0", "write LAYER.HEAD"),
        ("0.-1", "write LAYER.HEAD"),
        ("0.0+0.0", "named twice"),
    ],
)
def test_heads_that_do_not_exist_are_refused(heads, message):
    with pytest.raises(UserError, match=message):
        parse_heads(heads, tiny_config("kvc_w8s8_2kv"))


def test_positions_that_do_not_exist_are_refused():
    for band in (0, 20):
        with pytest.raises(UserError, match=f"--band {band}: choose from 1 to 19"):
            knockouts(tiny_config("kvc_w8s8_2kv"), 20, band=band)
    with pytest.raises(UserError, match="--controls -1"):
        knockouts(tiny_config("kvc_w8s8_2kv"), 20, controls=-1)


def test_calibration_that_overlaps_is_refused():
    evaluation, calibration = made_up_prompts(0).tokens, made_up_prompts(1).tokens.copy()
    check_disjoint(calibration, evaluation)
    assert digest(calibration) != digest(evaluation) and len(digest(calibration)) == 64
    calibration[1, 2] = evaluation[2, 0]
    with pytest.raises(UserError, match=f"1 of {SAMPLES * RESIDUES} calibration prompts.*--calibration-seed"):
        check_disjoint(calibration, evaluation)


def test_the_report_counts_by_hand():
    """Two heads, one of which loses what is right at phase 1 alone."""
    config = tiny_config("kvc_w4s4_1kv", window=2, stride=2, exact_width=2)
    plan = knockouts(config, 20)[:2]
    clean = np.zeros((100, 4), bool)
    clean[:80] = True  # right in 80 rows
    clean[:, 2] = False  # never at residue 2
    lost = clean.copy()
    lost[:60, [1, 3]] = False
    correct = np.stack([clean, clean, lost], axis=1)
    report = knockout_report({"correct": correct, "nll": np.where(correct, 0.5, 2.0)}, plan, config)
    same, changed = report["knockouts"]
    assert report["clean"]["mean"] == pytest.approx(0.6) and report["clean"]["worst_residue"] == 2
    assert same["mean"] == same["nll"] == 0 and same["p_loss"] == same["p_relative"] == 1
    assert same["relative_change"] == [0, 0, None, 0] and same["loss_phases"] is None
    assert changed["relative_change"] == [0, -75, None, -75]
    low, high = changed["relative_low"][1], changed["relative_high"][1]
    assert low < -75 < high and changed["relative_low"][2] is None
    assert changed["mean"] == pytest.approx(-0.3) and changed["nll"] == pytest.approx(0.45)
    assert changed["nll_interval"][0] < 0.45 < changed["nll_interval"][1]
    assert changed["loss_by_phase"] == pytest.approx([0, 0.6]) and changed["loss_phases"] == pytest.approx(1)
    assert changed["p_relative"] < 0.002 and changed["p_relative_holm"] == pytest.approx(2 * changed["p_relative"])
    assert changed["query_heads"] == [[1, 0], [1, 1]]
