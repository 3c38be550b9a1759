"""The whole chain against the numbers that the authors published (percent, rounded; compared to the digit)."""

import json
from pathlib import Path

import numpy as np
import pytest

from phase_jax.statistics import detect_period, summarise, wilson

PUBLISHED = json.loads((Path(__file__).parent / "data" / "published_curves.json").read_text())
N = 1000  # logical samples of the controlled models
CURVES = [
    pytest.param(model[protocol], model["S"], id=f"{model['id']}-{protocol}")
    for model in PUBLISHED["controlled"]
    for protocol in ("pp", "ip")
]
NEEDLES = [pytest.param(model, id=model["id"]) for model in PUBLISHED["needle_128k"]["models"]]
FLAT = [pytest.param(model, id=model["id"]) for model in PUBLISHED["full_attention"]]


def rounds_to(value, printed, digits):
    """Half a unit of the last digit; an exact half may go either way."""
    return np.all(np.abs(np.asarray(value) - np.asarray(printed)) <= 0.5 * 10.0**-digits + 1e-9)


def test_all_curves_are_there():
    assert len(CURVES) == 26 and len(FLAT) == 2 and len(NEEDLES) == 4


@pytest.mark.parametrize(("curve", "stride"), CURVES)
def test_compressed_curve(curve, stride):
    accuracy = np.array(curve["acc"]) / 100
    assert detect_period(accuracy, N) == stride
    numbers = summarise(accuracy)
    assert rounds_to(100 * numbers["mean"], curve["mean"][0], 2)
    assert rounds_to(100 * numbers["gap"], curve["gap"][0], 1)


@pytest.mark.parametrize("model", FLAT)
def test_full_attention(model):
    accuracy = np.array(model["acc"]) / 100
    assert detect_period(accuracy, N) is None
    numbers = summarise(accuracy)
    assert rounds_to(100 * numbers["mean"], model["mean"], 2)
    assert rounds_to(100 * numbers["gap"], model["gap"], 1)
    low, high = wilson(np.rint(accuracy * N), N)
    assert rounds_to(100 * low, model["lo"], 2) and rounds_to(100 * high, model["hi"], 2)


@pytest.mark.parametrize("model", NEEDLES)
def test_needle(model):
    correct, n = np.array(model["correct"]), model["n"]
    low, high = wilson(correct, n)
    assert rounds_to(100 * low, model["lo"], 2) and rounds_to(100 * high, model["hi"], 2)
    numbers = summarise(correct / n)
    for name in ("mean", "worst", "gap"):
        assert rounds_to(100 * numbers[name], model[name], 2)
    assert rounds_to(100 * correct / n, model["acc"], 2)
    assert detect_period(correct / n, n) == model["S"]


def test_needle_curves_repeat_after_four():
    """Mean |A(r) - A(r + 4)| in points: 1.07 to 1.95 for the V4 models, both ends among the three in the file."""
    repeats = {}
    for model in PUBLISHED["needle_128k"]["models"]:
        accuracy = 100 * np.array(model["correct"]) / model["n"]
        repeats[model["id"]] = np.abs(accuracy[:4] - accuracy[4:]).mean()
    assert rounds_to(repeats["pro_full"], 1.07, 2)
    assert rounds_to(repeats["pro_base"], 1.95, 2)
    assert 1.07 < repeats["flash_base"] < 1.95


def test_v41_even_residues_exceed_odd_ones():
    correct = next(m["correct"] for m in PUBLISHED["needle_128k"]["models"] if m["id"] == "dsv41_flash_0910")
    assert min(correct[0::2]) > max(correct[1::2])
