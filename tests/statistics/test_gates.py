"""Effective offsets, profiles and alignment, against the published models and against slow loops."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from phase_jax.statistics import alignment, best_shift, effective_offsets, gate_profile
from phase_jax.statistics.gates import CONCENTRATED

PUBLISHED = json.loads((Path(__file__).parent / "data" / "published_gates.json").read_text())["gates"]
MODELS = [pytest.param(model, id=model["id"]) for model in PUBLISHED]
REFERENCE = PUBLISHED[0]


@pytest.mark.parametrize("model", MODELS)
def test_published_profiles_give_the_published_static_concentration(model):
    mass = np.array(model["key_profile"]) / model["S"]  # W = S: the uniform share is 1/S
    printed = np.array(model["key_static_per_window"])[:, 0]
    np.testing.assert_allclose(effective_offsets(mass / mass.sum(axis=1, keepdims=True)), printed, atol=0.002)


def test_the_reference_model_peaks_early_amid_and_late():
    published = np.array(REFERENCE["key_profile"])
    profile = gate_profile(published / REFERENCE["S"], np.arange(REFERENCE["S"]), REFERENCE["S"])
    np.testing.assert_allclose(profile, published)
    peaks = profile.argmax(axis=1)
    assert [int(peaks[layer]) for layer in (14, 10, 9)] == [2, 4, 6]


def test_nine_published_heads_are_concentrated_and_six_have_their_value_peak_one_after():
    after = []
    for model in PUBLISHED:
        mass = np.array(model["key_profile"]) / model["S"]
        concentrated = effective_offsets(mass) < CONCENTRATED * model["S"]
        same = np.argmax(model["key_profile"], axis=1) == np.argmax(model["value_profile_rolled"], axis=1)
        after += list(same[concentrated])
    assert (len(after), sum(after)) == (9, 6)


@pytest.mark.parametrize(
    ("key", "value", "shift"),
    [
        ([0, 1, 0, 0], [0, 0, 1, 0], 1),
        ([0, 0, 0, 1], [1, 0, 0, 0], -3),
        ([0.25] * 4, [0.25] * 4, 0),
        ([0.45, 0.47, 0.05, 0.03], [0.1, 0.35, 0.4, 0.15], 1),  # the peaks differ by one
        ([0.47, 0.45, 0.05, 0.03], [0.1, 0.35, 0.4, 0.15], 1),  # here by two
        ([1], [1], 0),
    ],
)
def test_the_shift_that_lays_one_gate_on_the_other(key, value, shift):
    assert best_shift(key, value) == shift
    products = {d: sum(k * value[i + d] for i, k in enumerate(key) if 0 <= i + d < len(key)) for d in range(-3, 4)}
    assert products[shift] == pytest.approx(max(products.values()))


@pytest.mark.parametrize("layer", [14, 10, 9])
def test_losses_of_the_reference_model_lie_where_its_gates_are_open(layer):
    profile, loss = np.array(REFERENCE["key_profile"][layer][:-1]), -np.array(REFERENCE["knockout"][layer][:-1])
    found = alignment(profile, loss)
    assert found["correlation"] == pytest.approx(stats.spearmanr(profile, loss).statistic)
    assert found["correlation"] > 0.3
    by_loss = np.argsort(loss)[::-1]
    assert np.argmax(profile) in by_loss[:2], "the favoured phase is one of the two that suffer most"


@pytest.mark.parametrize("width", [1, 2, 8, 12])
def test_effective_offsets_at_both_ends_and_between(width):
    assert effective_offsets(np.eye(width)) == pytest.approx(np.ones(width))
    assert effective_offsets(np.full(width, 1 / width)) == pytest.approx(width)
    weights = np.random.default_rng(0).dirichlet(np.ones(width))
    by_hand = math.exp(-sum(w * math.log(w) for w in weights))
    assert effective_offsets(weights) == pytest.approx(by_hand) and 1 <= by_hand <= width + 1e-9
    assert effective_offsets(weights[:, None], axis=0) == pytest.approx([by_hand])


@pytest.mark.parametrize(("width", "stride", "origin"), [(8, 8, 0), (8, 4, -4), (8, 6, 0), (5, 3, -2), (12, 12, 0)])
def test_profile_by_a_loop(width, stride, origin):
    mass = np.random.default_rng(1).dirichlet(np.ones(width), size=(2, 3))
    phases = [(origin + i) % stride for i in range(width)]
    expected = np.zeros((2, 3, stride))
    for r in range(stride):
        offsets = [i for i in range(width) if phases[i] == r]
        expected[..., r] = mass[..., offsets].sum(axis=-1) / (len(offsets) / width)
    np.testing.assert_allclose(gate_profile(mass, phases, stride), expected)
    np.testing.assert_allclose(gate_profile(np.full(width, 1 / width), phases, stride), 1)


def test_alignment_is_spearmans_and_its_p_value_counts_all_pairings():
    rng = np.random.default_rng(2)
    for phases in (4, 6):
        profile, loss = rng.random(phases), rng.integers(0, 4, phases) * 1.0
        found = alignment(profile, loss)
        observed = stats.spearmanr(profile, loss).statistic
        assert found["correlation"] == pytest.approx(observed)
        drawn = [stats.spearmanr(order, loss).statistic for order in itertools.permutations(profile)]
        p_value = min(
            1, 2 * min(np.mean(np.array(drawn) >= observed - 1e-9), np.mean(np.array(drawn) <= observed + 1e-9))
        )
        assert found["p_value"] == pytest.approx(p_value)


def test_alignment_of_unknown_or_flat_losses_is_null():
    nothing = {"correlation": None, "p_value": None}
    assert alignment([1, 2, 3, 4], [0, 1, None, 2]) == nothing
    assert alignment([1, 2, 3, 4], [0, 1, np.nan, 2]) == nothing
    assert alignment([1, 2, 3, 4], [5, 5, 5, 5]) == nothing
    assert alignment([1, 1, 1, 1], [1, 2, 3, 4]) == nothing
