"""phase-jax gates and phase-jax cycle, from a trained run to what they store."""

import json
import shutil

import numpy as np
import pytest

from experiments.cli import main
from experiments.cycle import delta_range
from phase_jax.errors import UserError
from phase_jax.evaluation import sweep
from phase_jax.run import RunFolder
from phase_jax.training.loop import train
from tests.reports.lab import write_run
from tests.runs import tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A trained run of W4/S4; tests do not write into it."""
    path = tmp_path_factory.mktemp("run") / "w4s4"
    train(tiny_run(), RunFolder(path))
    return path


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy")


def test_gates_are_measured_at_every_checkpoint_and_once(copy, capsys, monkeypatch):
    command = ["gates", "--workdir", str(copy), "--protocols", "prefix", "--logical", "2"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    report = json.loads((copy / "interventions" / "gates-prefix.json").read_text())
    assert report["steps"] == [4, 8, 12] and np.shape(report["path"]["static"]) == (3, 1, 1)
    (head,) = report["heads"]
    assert head["key"]["static"] == report["path"]["static"][-1][0][0]
    assert np.sum(head["value"]["mass"]) == pytest.approx(1, abs=1e-5)
    assert (
        f"0.0 {head['key']['static']:.2f} / {head['key']['per_window']:.2f}" in " ".join(printed.split())
        and "statically concentrated" in printed
    )
    monkeypatch.setattr("phase_jax.interventions.gates.measure_gates", None)
    assert main(command) == 0, "measured before"


def test_cycling_measures_each_model_once_though_stopped(copy, capsys, monkeypatch):
    command = ["cycle", "--workdir", str(copy), "--protocols", "prefix", "--logical", "2", "--delta"]
    target = copy / "interventions" / "cycle-prefix.json"
    biases, stop, score = [], 2, sweep.score

    def counted(model, vocabulary, params, *batch):
        if len(biases) == stop:
            raise KeyboardInterrupt
        biases.append(np.asarray(params["layers"]["attention"]["compress_key"]["bias"]).tobytes())
        return score(model, vocabulary, params, *batch)

    monkeypatch.setattr(sweep, "score", counted)
    assert main([*command, "-1:1"]) == 130 and not target.exists()
    stop = None
    assert main([*command, "-1:1"]) == 0 and len(biases) == 3
    assert "δ" in capsys.readouterr().out and sorted(file.suffix for file in target.parent.iterdir()) == [
        ".json",
        ".npz",
    ]
    report = json.loads(target.read_text())
    assert [row["delta"] for row in report["cycled"]] == [-1, 1] and len(report["clean"]) == 4
    assert all(row["r2x"] is None for row in report["cycled"]), "three phases without the boundary"
    with np.load(target.with_suffix(".npz")) as arrays:
        assert set(arrays) == {"+0", "-1", "+1"} and arrays["+1"].shape == (2, 24)
        assert np.allclose(arrays["+0"].reshape(2, 6, 4).mean(axis=(0, 1)), report["clean"])

    assert main([*command, "-1"]) == 0 and "measured before" in capsys.readouterr().out
    assert main([*command, "-3:2"]) == 0 and len(biases) == 4, "in windows of 4, −3 is 1 and 2 is −2"
    again = json.loads(target.read_text())
    assert [row["delta"] for row in again["cycled"]] == [-3, -2, -1, 1, 2]
    assert again["cycled"][2:4] == report["cycled"]
    assert again["cycled"][0] == report["cycled"][1] | {"delta": -3}
    assert len(set(biases)) == 4


def test_an_evaluation_of_the_same_prompts_is_the_clean_curve(copy):
    assert main(["evaluate", "--workdir", str(copy), "--logical", "2"]) == 0
    assert main(["cycle", "--workdir", str(copy), "--protocols", "prefix", "--logical", "2", "--delta", "1"]) == 0
    report = json.loads((copy / "evaluations" / "prefix.json").read_text())
    cycled = json.loads((copy / "interventions" / "cycle-prefix.json").read_text())
    assert cycled["clean"] == pytest.approx(report["by_phase"])


@pytest.mark.parametrize(
    ("text", "deltas"),
    [("-3:3", [-3, -2, -1, 1, 2, 3]), ("2", [2]), ("-1:0", [-1]), ("0:1", [1])],
)
def test_ranges_of_delta(text, deltas):
    assert delta_range(text) == deltas


@pytest.mark.parametrize("text", ["", "a", "1.5", "-3:3:1", "3:-3", "0", "0:0", "-3..3", "1:"])
def test_what_is_no_range_of_delta(text):
    with pytest.raises(UserError, match="--delta"):
        delta_range(text)


@pytest.mark.parametrize(
    ("model", "command", "message"),
    [
        ("full_attn_1kv", ["gates"], "full attention"),
        ("full_attn_1kv", ["cycle"], "full attention"),
        ("kvc_w8s8_1kv_baseline", ["cycle", "--delta", "-8:8"], "--delta -8 goes beyond the window"),
        ("kvc_w8s8_1kv_baseline", ["cycle", "--delta", "1.5"], "give a whole number"),
        ("kvc_w8s8_1kv_baseline", ["cycle", "--logical", "0"], "at least one logical sample"),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(model, command, message, tmp_path, capsys):
    path = write_run(tmp_path / "run", model, protocols=())
    verb, *rest = command
    assert main([verb, "--workdir", str(path), *rest]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (path / "interventions").exists()


def test_a_run_that_is_not_trained(tmp_path, capsys):
    assert main(["cycle", "--workdir", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err
