"""Cycling's prediction, R² and errors: the published numbers, and loops in plain Python."""

import json
from pathlib import Path

import numpy as np
import pytest

from phase_jax.statistics import cycling_report, fold
from phase_jax.statistics.cycling import absolute_error, compared_phases, predicted, r_squared

PUBLISHED = json.loads((Path(__file__).parent / "data" / "published_gates.json").read_text())["cycling"]
CONDITIONS = [
    pytest.param(run, condition, id=f"{run['id']}{condition['delta']:+}")
    for run in PUBLISHED
    for condition in run["conditions"]
]


@pytest.mark.parametrize(("run", "condition"), CONDITIONS)
def test_published_arrays_give_the_published_numbers(run, condition):
    clean, observed = np.array(run["clean"]), np.array(condition["observed"])
    delta = condition["delta"]
    np.testing.assert_array_equal(predicted(clean, delta), condition["predicted"])
    every, inside, interior = compared_phases(delta, run["S"])
    for name, phases in (("r2a", every), ("r2x", inside), ("r2i", interior)):
        assert r_squared(clean, observed, delta, phases) == pytest.approx(condition[name], abs=0.001)
    for name, phases in (("maeA", every), ("maeI", interior)):
        assert absolute_error(clean, observed, delta, phases) == pytest.approx(condition[name], abs=0.01)


def test_all_published_conditions_are_there():
    assert [condition.values[1]["delta"] for condition in CONDITIONS] == [-3, -2, -1, 1, 2, 3] * 4


def answers(curve, n, seed):
    """Right answers [n, 24] of a model whose accuracy at each phase is `curve`."""
    chance = np.tile(curve, 24 // len(curve))
    return np.random.default_rng(seed).random((n, 24)) < chance


CURVE = np.array([0.2, 0.9, 0.3, 0.1, 0.6, 0.1, 0.4, 0.05])


def test_a_model_that_moves_exactly_is_found_to():
    clean = answers(CURVE, 200, 0)
    cycled = np.roll(clean, 2, axis=1)
    report = cycling_report(clean, cycled, 2, 8, replicates=200)
    for name in ("r2a", "r2x", "r2i"):
        assert report[name] == pytest.approx(1) and report[f"{name}_interval"] == pytest.approx([1, 1])
    assert report["maeA"] == pytest.approx(0) and report["maeI"] == pytest.approx(0)
    assert report["change_of_mean"] == pytest.approx(0)
    assert report["best"] == {
        "predicted_phase": 3,
        "observed_phase": 3,
        "share": pytest.approx(1),
        "share_interval": pytest.approx([1, 1]),
    }


def test_a_model_that_does_not_move_is_found_not_to():
    clean, cycled = answers(CURVE, 400, 0), answers(CURVE, 400, 1)
    report = cycling_report(clean, cycled, 2, 8, replicates=400)
    assert report["best"]["share"] < 0.5 and report["maeI"] > 0.2
    assert report["best"]["predicted_phase"] == 3 and report["best"]["observed_phase"] == 4, "phase 1 is no inner one"
    low, high = report["change_of_mean_interval"]
    assert low < 0 < high
    observed = fold(cycled, 8).mean(axis=0)
    low, high = np.array(report["observed_interval"])
    assert (low < observed).all() and (observed < high).all() and (high - low < 0.1).all()


def test_intervals_draw_logical_samples_together():
    # A sample is right everywhere or nowhere, in both arms: the change of the mean never varies, the curves do.
    right = np.arange(100) % 2 == 0
    clean = np.repeat(right[:, None], 24, axis=1)
    report = cycling_report(clean, clean, 1, 4, replicates=200)
    low, high = report["observed_interval"]
    assert low[0] < 0.5 < high[0] and report["maeA_interval"] == [0, 0]


def test_fewer_than_four_phases_have_no_r_squared():
    clean, cycled = answers(CURVE[:4], 50, 0), answers(CURVE[:4], 50, 1)
    report = cycling_report(clean, cycled, 1, 4, replicates=50)
    assert report["r2a"] is not None and report["r2x"] is None and report["r2i"] is None
    assert report["r2x_interval"] is None and report["maeI"] is not None
    two = cycling_report(clean, cycled, 1, 2, replicates=50)
    assert two["r2a"] is None and two["maeI"] is None and two["best"] is None, "nothing is interior"


def test_a_flat_curve_has_no_r_squared():
    clean = np.ones((20, 24), bool)
    report = cycling_report(clean, answers(CURVE, 20, 0), 1, 8, replicates=50)
    assert report["r2a"] is None and report["r2x"] is None and report["maeA"] > 0


@pytest.mark.parametrize("delta", [-7, -1, 1, 5])
def test_phases_that_are_left_out_by_hand(delta):
    every, inside, interior = compared_phases(delta, 8)
    assert every.all() and list(np.flatnonzero(~inside)) == [7]
    assert set(np.flatnonzero(~interior)) == {7, (7 + delta) % 8}
