"""The calibration, at a size that a test can afford: bounds have room for three standard errors."""

import json
from functools import partial

import numpy as np
import pytest

from experiments.calibrate import calibrate, main, misses
from phase_jax.errors import UserError

DATASETS = 120


@pytest.fixture(scope="module")
def result():
    return calibrate(datasets=DATASETS, seed=5, samples=(100, 1000), replicates=300, permutations=300)


def within(share, low, high):
    """Whether a share of DATASETS is compatible with a true one in [low, high]."""
    room = 3 * np.sqrt(max(low * (1 - low), high * (1 - high)) / DATASETS)
    return low - room <= share <= high + room


def test_all_settings_are_there(result):
    flat = {(row["accuracy"], row["n"]) for row in result["coverage"] if row["truth"] == "flat"}
    assert flat == {(a, n) for a in (0.05, 0.5, 0.95) for n in (100, 1000)}
    json.dumps(result, allow_nan=False)


def test_false_alarms_are_five_percent(result):
    for row in result["coverage"]:
        if row["truth"] == "flat":
            assert within(row["verdict"]["sensitive"], 0.03, 0.07), row


def test_coverage(result):
    for row in result["coverage"]:
        for name in ("wilson", "bootstrap", "mean"):
            assert within(row["coverage"][name], 0.93, 0.97), (name, row)
        for name in ("worst", "gap", "sigma"):
            assert within(row["coverage"][name], 0.93, 1.0), (name, row)


def test_the_percentile_gap_is_as_wrong_as_its_label_says(result):
    assert all(row["coverage"]["gap_percentile"] == 0 for row in result["coverage"] if row["truth"] == "flat")


def test_period_detector(result):
    for row in result["coverage"]:
        if row["truth"] == "flat" and row["n"] == 1000:
            assert 1 - row["periods"].get("none", 0) <= 0.03, row
    for row in result["period"]:
        if row["truth"] == "one phase" and row["n"] == 1000:
            assert within(row["right"], 0.85 if row["stride"] == 12 else 0.98, 1.0), row


def test_no_false_reassurance(result):
    """A gap of 0.10 or more is never `not seen` beyond the error of the gap's upper bound."""
    for row in result["coverage"]:
        if row["gap"] >= 0.0999:
            assert within(row["verdict"]["not seen"], 0.0, 0.025), row


def test_misses_name_what_is_outside(result):
    row = {**result["coverage"][0], "coverage": {**result["coverage"][0]["coverage"], "gap": 0.5}}
    lines = misses({"coverage": [row], "period": []})
    assert any("gap 50.0%, wanted 93% to 100%" in line for line in lines)


def test_command(tmp_path, capsys, monkeypatch):
    from experiments import calibrate as module

    monkeypatch.setattr(module, "calibrate", partial(module.calibrate, samples=(100,)))
    path = tmp_path / "calibration.json"
    assert main(["--datasets", "2", "--seed", "3", "--json", str(path)]) == 0
    assert json.loads(path.read_text())["settings"]["seed"] == 3
    assert "one phase" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["--datasets", "0"], ["--correlation", "1.5"], ["--json", "/nowhere/at/all.json"]])
def test_bad_arguments(argv):
    with pytest.raises(UserError, match=argv[0]):
        main(argv)
