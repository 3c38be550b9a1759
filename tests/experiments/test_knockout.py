"""phase-jax knockout and phase-jax counterfactual, from a run to what they store, and to the page."""

import json

import numpy as np
import pytest

from experiments.cli import main
from phase_jax.reports import counterfactual, knockout
from phase_jax.training import loop
from tests.model.tiny import draw_params
from tests.runs import as_if_trained


@pytest.fixture
def run_of(tmp_path, monkeypatch):
    """Makes the folder of a run that is as if trained, to random parameters."""
    monkeypatch.setattr(loop, "load_params", lambda config, folder: draw_params(config.model))

    def make(variant="kvc_w4s4_1kv", **changes):
        return as_if_trained(tmp_path / variant, variant, **changes).path

    return make


def stored(path, name):
    with np.load(path / "interventions" / f"{name}.npz") as arrays:
        return json.loads((path / "interventions" / f"{name}.json").read_text()), dict(arrays)


def test_knockouts_are_measured_once_and_drawn(run_of, capsys, monkeypatch):
    path = run_of()
    command = ["knockout", "--workdir", str(path), "--protocols", "prefix", "--logical", "3", "--calibration", "2"]
    command += ["--band", "2", "--controls", "1", "--means", "phase"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    report, arrays = stored(path, "knockout-prefix")
    names = [entry["name"] for entry in report["knockouts"]]
    assert names == ["0.0", "layer 0"], "a control of all query heads is none"
    assert all(name in printed for name in names)
    assert report["calibration_prompts"] == 48 and len(report["calibration_sha256"]) == 64
    assert arrays["correct"].shape == (3, 3, 24) and arrays["means"].shape[:3] == (1, 4, 2)
    assert report["clean"]["accuracy"] == pytest.approx(arrays["correct"][:, 0].mean(axis=0))
    (drawing,) = knockout.drawings({"knockout-prefix": report})
    assert [row[0] for row in drawing.rows] == ["0.0", "layer 0, last 2"]
    monkeypatch.setattr("phase_jax.interventions.knockout.measure", None)
    assert main(command) == 0 and "measured before" in capsys.readouterr().out

    # The clean answers are those of an evaluation of the same prompts.
    assert main(["evaluate", "--workdir", str(path), "--protocol", "prefix", "--logical", "3"]) == 0
    with np.load(path / "evaluations" / "prefix.npz") as evaluated:
        np.testing.assert_allclose(arrays["nll"][:, 0], evaluated["nll"], rtol=1e-5, atol=1e-5)
    page = path.parent / "report.html"
    assert main(["report", str(path), "--out", str(page)]) == 0
    assert "knockouts of heads" in page.read_text().lower()
    assert (page.with_name("report-figures") / "kvc_w4s4_1kv-knockout-prefix.svg").exists()


def test_causes_are_measured_once_and_shown(run_of, capsys, monkeypatch):
    path = run_of()
    command = [
        "counterfactual",
        "--workdir",
        str(path),
        "--protocols",
        "prefix",
        "--logical",
        "2",
        "--calibration",
        "1",
    ]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert all(words in printed for words in ("boundary", "input-dependent gates", "payload maps", "what remains"))
    report, arrays = stored(path, "counterfactual-prefix")
    assert arrays["nll"].shape == (2, len(report["conditions"]), 24)
    assert report["alone"]["shuffled"] is None and report["alone"]["boundary"] is not None
    monkeypatch.setattr("phase_jax.interventions.counterfactual.measure", None)
    assert main(command) == 0 and "measured before" in capsys.readouterr().out
    (drawing,) = counterfactual.drawings({"counterfactual-prefix": report})
    assert len(drawing.figure.axes) == 1 and drawing.rows[4][0] == "what remains"
    # With windows that overlap there is no boundary to draw or name.
    none = {column: {**report[column], "boundary": None} for column in ("alone", "in_order")}
    (drawing,) = counterfactual.drawings({"counterfactual-prefix": {**report, **none}})
    assert drawing.rows[0][1] == "–" and "boundary" not in drawing.description


@pytest.mark.parametrize(
    ("variant", "command", "message"),
    [
        ("kvc_w4s4_1kv", ["knockout", "--sets", "0.0+1.0"], "no head 1.0"),
        ("kvc_w4s4_1kv", ["knockout", "--band", "87"], "--band 87: choose from 1 to 86"),
        ("kvc_w4s4_1kv", ["knockout", "--calibration-seed", "0"], "is the seed of the evaluation"),
        ("kvc_w4s4_1kv", ["knockout", "--calibration", "0"], "--calibration 0"),
        ("full_attn_1kv", ["knockout", "--means", "phase"], "no phases"),
        ("full_attn_1kv", ["counterfactual"], "full attention"),
        ("kvc_w8s8_1kv_meanpool", ["counterfactual"], "uniform gates"),
        ("kvc_w4s4_1kv", ["counterfactual", "--calibration-seed", "0"], "is the seed of the evaluation"),
    ],
)
def test_mistakes_are_one_line(run_of, capsys, variant, command, message):
    path = run_of(variant)
    assert main([*command, "--workdir", str(path), "--logical", "48"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and not (path / "interventions").exists()


def test_reproduce_runs_each_tool_on_the_models_it_applies_to(tmp_path, monkeypatch):
    from experiments import counterfactual, cycle, gates, report, reproduce
    from experiments import knockout as verb

    ran = []

    def recorded(name):
        return lambda folder, protocol, *args, **kwargs: ran.append((name, folder.path.name, protocol)) or ({}, False)

    for module, run, *tables in (
        (verb, "knockout_run", "table"),
        (counterfactual, "counterfactual_run", "table"),
        (gates, "gates_run"),
        (cycle, "cycle_run", "cycling_table"),
    ):
        monkeypatch.setattr(module, run, recorded(run))
        for table in tables:
            monkeypatch.setattr(module, table, lambda report: "")
    monkeypatch.setattr(report, "main", lambda arguments: ran.append(arguments))
    variants = ("full_attn_1kv", "kvc_w8s4", "kvc_w4s4_1kv", "kvc_w8s8_1kv_meanpool")
    reproduce.causal([reproduce.lab_run(variant) for variant in variants], tmp_path, ["target"], 5)
    everything = ("knockout_run", "counterfactual_run", "gates_run", "cycle_run")
    expected = {
        "full_attn_1kv": everything[:1],
        "kvc_w8s4": everything[:3],
        "kvc_w4s4_1kv": everything,
        "kvc_w8s8_1kv_meanpool": everything[:1],
    }
    assert ran[:-1] == [(run, variant, "target") for variant, runs in expected.items() for run in runs]
    assert ran[-1] == [str(tmp_path), "--out", str(tmp_path / "report.html")]
