"""The command: help with examples, mistakes as one line, and `reproduce` from nothing to a figure."""

import errno
import importlib.util
import json
import os

import numpy as np
import pytest

from configs.family import as_config_dict
from experiments import cli
from phase_jax.run import RunFolder
from phase_jax.training import loop
from tests.runs import as_if_trained, tiny_run

LAB = "--config=configs/lab.py:kvc_w8s8_1kv_baseline"


@pytest.fixture
def refused(capsys, tmp_path):
    """Runs a command that must exit with 2, one line on stderr and no change of tmp_path; returns the line."""

    def run(*arguments):
        before = contents(tmp_path)
        assert cli.main([str(argument) for argument in arguments]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        assert line.startswith("phase-jax: ")
        assert contents(tmp_path) == before, "something was written"
        return line

    return run


def contents(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def untrained(path, **changes):
    """A run's folder before its first step."""
    folder = RunFolder(path)
    folder.claim(tiny_run(**changes))
    return folder


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_help_with_an_example(verb, capsys):
    try:
        code = cli.main([verb, "--help"])
    except SystemExit as stopped:
        code = stopped.code
    printed = capsys.readouterr().out
    assert code == 0
    assert "usage: phase-jax" in printed and f"phase-jax {verb}" in printed.partition("example:")[2]


def test_help_lists_the_verbs(capsys):
    for arguments in ([], ["--help"]):
        assert cli.main(arguments) == 0
        printed = capsys.readouterr().out
        assert all(f"  {verb}" in printed for verb in cli.VERBS)


@pytest.mark.parametrize(
    ("verb", "said"),
    [
        ("reproduse", "unknown verb 'reproduse'; did you mean 'reproduce'?"),
        ("qqq", "unknown verb 'qqq'; phase-jax --help lists them"),
    ],
)
def test_an_unknown_verb_names_the_nearest(verb, said, refused):
    assert said in refused(verb)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--config=configs/lab.py:kvc_w8s8_1kv_baselin"], "did you mean 'kvc_w8s8_1kv_baseline'?"),
        ([LAB, "--config.train.stps=5"], "steps"),
        ([LAB, "--config.trian.steps=5"], "train"),
        ([LAB, "--config.train.optimizer.learningrate=1"], "learning_rate"),
        ([LAB, "--config.train.steps=many"], "many"),
        ([LAB, "--config.model.qk_norm=7"], "qk_norm"),
        (["--config=configs/nowhere.py:kvc_w4s4_1kv"], "there is no such file"),
        (["--config=configs/lab.py"], "name a model id after a colon"),
        ([], "--config is missing: for example --config="),
        ([LAB, "--config.model.stride=9"], "the stride must be between 1 and the width"),
        ([LAB, "--config.model.exact_width=6"], "need at least 7"),
        ([LAB, "--config.model.gate=sharp"], "choose scalar, vector, uniform"),
        ([LAB, "--config.model.vocabulary=20"], "model.vocabulary 20 is smaller than the task's 131"),
        ([LAB, "--config.data.length=90"], "prompt length 90 is too short for 24 records and 8 demonstrations"),
        ([LAB, "--config.data.demonstrations=24"], "24 demonstrations: choose from 0 to 23"),
        (
            [LAB, "--config.data.demonstrations=3", "--config.data.closing_filler=2"],
            "put 8 tokens between records and query, which must be more than the 8 that the exact branch reaches: set"
            " data.closing_filler to 3 or more",
        ),
        ([LAB, "--config.model.stride=5"], "model.stride is 5: it must divide the 24 residues"),
        ([LAB, "--config.data.words=10"], "records need as many single-token words of a kind; data.words is 10"),
        ([LAB, "--config.data.words=65"], "model.vocabulary 131 is smaller than the task's 133"),
        ([LAB, "--config.train.steps=0"], "train.steps is 0: it must be at least 1"),
        ([LAB, "--wrkdir=x"], "--wrkdir"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else "",
)
def test_a_run_that_cannot_be_is_refused(arguments, said, refused, tmp_path):
    assert said in refused("train", *arguments, f"--workdir={tmp_path / 'run'}")


def test_a_run_without_a_folder_is_refused(refused):
    assert "--workdir" in refused("train", LAB)


def test_training_in_the_folder_of_another_configuration_is_refused(refused, tmp_path):
    untrained(tmp_path / "run")
    line = refused("train", LAB, f"--workdir={tmp_path / 'run'}")
    assert "holds a run of another configuration" in line and "choose another --workdir" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--logical", "0"], "--logical 0: at least one logical sample is needed"),
        (["--logical", "few"], "few"),
        (["--models", "kvc_w4s4_1k"], "unknown model id 'kvc_w4s4_1k'; did you mean 'kvc_w4s4_1kv'?"),
        (["--steps", "0"], "train.steps is 0"),
        (["--protocols", "suffix"], "suffix"),
    ],
)
def test_reproduce_refuses_before_it_writes(arguments, said, refused, tmp_path):
    assert said in refused("reproduce", *arguments, "--workdir", tmp_path / "work")


def test_evaluating_where_there_is_no_run_is_refused(refused, tmp_path):
    assert "holds no run" in refused("evaluate", "--workdir", tmp_path / "nothing")


def test_evaluating_a_run_that_is_not_trained_is_refused(refused, tmp_path):
    untrained(tmp_path / "run")
    assert "is not trained to its end yet: continue it" in refused("evaluate", "--workdir", tmp_path / "run")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--logical", "0"], "--logical 0"),
        (["--protocol", "suffix"], "suffix"),
    ],
)
def test_an_evaluation_that_cannot_be_is_refused(arguments, said, refused, tmp_path):
    as_if_trained(tmp_path / "run")
    assert said in refused("evaluate", "--workdir", tmp_path / "run", *arguments)


def test_a_configuration_that_is_no_json_is_named(refused, tmp_path):
    folder = as_if_trained(tmp_path / "run")
    folder.config.write_text("{")
    assert "config.json is not JSON" in refused("evaluate", "--workdir", folder.path)


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (KeyboardInterrupt(), 130, ""),
        (OSError(errno.ENOSPC, "full", "metrics.jsonl"), 2, "no space left on the disk (metrics.jsonl)"),
    ],
)
def test_what_may_happen_to_any_verb(raised, code, said, monkeypatch, capsys):
    def main(argv):
        raise raised

    monkeypatch.setattr(importlib.import_module("experiments.configs"), "main", main)
    assert cli.main(["configs"]) == code
    assert said in capsys.readouterr().err


def test_an_error_of_ours_is_not_hidden(monkeypatch):
    def main(argv):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(importlib.import_module("experiments.configs"), "main", main)
    with pytest.raises(OSError, match="broken"):
        cli.main(["configs"])


MODELS = ("full_attn_1kv", "kvc_w4s4_1kv")
NUMBERS = {
    *("model", "W", "S", "kv_heads", "protocol", "residues", "n_logical", "validation_loss"),
    *("mean", "worst", "worst_residue", "gap", "sigma", "normalised_gap", "period"),
}
FOLDED = {"by_phase", "phase_worst", "phase_gap", "phase_sigma"}
WITHIN = {"boundary_phase", "within_window_gap"}
CURVES = {
    *("accuracy", "wilson_low", "wilson_high", "nll", "gold_probability"),
    *("target_position_mean", "target_position_variance"),
}


def tiny_lab(variant):
    """One stage and one loss: half of the compilations."""
    return as_config_dict(tiny_run(variant, train={"first_layer_weight": 0.0}, data={"curriculum": ((1.0, 4, 28),)}))


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory):
    """(folder, arguments) of `phase-jax reproduce` on two tiny models."""
    workdir = tmp_path_factory.mktemp("reproduce")
    arguments = ["reproduce", "--models", *MODELS, "--steps", "6", "--logical", "9", "--workdir", str(workdir)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("configs.lab.get_config", tiny_lab)
        assert cli.main(arguments) == 0
    return workdir, arguments


def summary(workdir):
    return json.loads((workdir / "summary.json").read_text())["reports"]


@pytest.mark.slow
def test_reproduce_reports_every_model_under_both_paddings(reproduced):
    reports = summary(reproduced[0])
    assert [(r["model"], r["protocol"]) for r in reports] == [
        (model, protocol) for model in MODELS for protocol in ("prefix", "insequence")
    ]
    for report in reports:
        assert set(report) >= NUMBERS | FOLDED | WITHIN | CURVES
        assert (report["n_logical"], report["residues"]) == (9, 24)
        assert all(len(report[name]) == 24 for name in CURVES)
        compressed = report["model"] != "full_attn_1kv"
        assert (report["W"], report["S"]) == ((4, 4) if compressed else (None, None))
        assert all((report[name] is not None) == compressed for name in FOLDED | WITHIN)
        assert not compressed or len(report["by_phase"]) == 4


@pytest.mark.slow
def test_reports_say_what_the_stored_scores_say(reproduced):
    workdir, _ = reproduced
    for report in summary(workdir):
        stored = RunFolder(workdir / report["model"]).evaluation(report["protocol"])
        assert json.loads(stored.with_suffix(".json").read_text()) == report
        with np.load(stored.with_suffix(".npz")) as scores:
            assert scores["correct"].shape == (9, 24)
            accuracy = [sum(map(bool, column)) / 9 for column in scores["correct"].T]
            for name in ("nll", "gold_probability"):
                np.testing.assert_allclose(report[name], scores[name].mean(axis=0), rtol=1e-5)
            np.testing.assert_allclose(report["target_position_mean"], scores["target_position"].mean(axis=0))
            np.testing.assert_allclose(report["target_position_variance"], scores["target_position"].var(axis=0))
        assert report["accuracy"] == pytest.approx(accuracy)
        assert report["mean"] == pytest.approx(sum(accuracy) / 24)
        assert report["gap"] == pytest.approx(max(accuracy) - min(accuracy))
        assert report["checks"]["mean_deviation"] <= 24 / 9


@pytest.mark.slow
def test_reproduce_draws_the_figure(reproduced):
    workdir, _ = reproduced
    assert (workdir / "accuracy.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "<svg" in (workdir / "accuracy.svg").read_text()[:2000]


@pytest.mark.slow
def test_a_second_reproduce_reuses_all_of_it_and_says_so(reproduced, monkeypatch, capsys):
    workdir, arguments = reproduced
    before = summary(workdir)
    monkeypatch.setattr("configs.lab.get_config", tiny_lab)
    monkeypatch.setattr(loop, "make_train_step", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr("phase_jax.evaluation.sweep.sweep", lambda *_: pytest.fail("measured again"))
    assert cli.main(arguments) == 0
    said = " ".join(capsys.readouterr().err.split())
    for model in MODELS:
        assert f"{model}: trained before (6 steps), reused" in said
        for protocol in ("prefix", "insequence"):
            assert f"{model}: {protocol} measured before, reused" in said
    assert summary(workdir) == before


@pytest.mark.slow
def test_reproduce_in_the_folder_of_other_runs_is_refused(reproduced, monkeypatch, capsys):
    workdir, arguments = reproduced
    monkeypatch.setattr("configs.lab.get_config", tiny_lab)
    before = contents(workdir)
    assert cli.main([*arguments, "--seed", "9"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "another configuration (seed is 7, not 9): choose another --workdir" in line
    assert contents(workdir) == before


@pytest.mark.parametrize(("vendor", "platforms"), [("0x8086", "cpu"), ("0x1ae0", None)])
def test_libtpu_without_a_tpu_does_not_make_jax_look_for_one(vendor, platforms, monkeypatch, tmp_path):
    (tmp_path / "devices" / "0").mkdir(parents=True)
    (tmp_path / "devices" / "0" / "vendor").write_text(f"{vendor}\n")
    monkeypatch.setattr(cli, "PCI_DEVICES", tmp_path / "devices")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "libtpu" else None)
    monkeypatch.delenv("JAX_PLATFORMS")
    cli.leave_absent_tpus_alone()
    assert os.environ.get("JAX_PLATFORMS") == platforms
    monkeypatch.setenv("JAX_PLATFORMS", "")  # so that what was set is undone
