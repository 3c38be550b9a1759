"""What a page is made of: every kind of input, and one clear line for what is none."""

import json
import shutil

import pytest

from phase_jax.errors import UserError
from phase_jax.reports.results import load
from tests.reports.lab import LOGICAL, PHASES, RESIDUES

BASELINE = "kvc_w8s8_1kv_baseline"


@pytest.fixture
def report(lab_folder):
    return json.loads((lab_folder / BASELINE / "evaluations" / "prefix.json").read_text())


def test_a_run_folder_brings_its_prompts_and_its_configuration(lab_folder):
    (run,) = load([lab_folder / BASELINE])
    assert run.name == run.model == BASELINE
    assert [result.protocol for result in run.results] == ["prefix", "insequence"]
    assert run.results[0].scores["correct"].shape == (LOGICAL, RESIDUES)
    assert run.config["seed"] == 42 and run.training["validation_loss"] == 0.4


def test_a_folder_of_runs_and_its_summary_hold_the_same_reports(lab_folder):
    folder, summary = load([lab_folder]), load([lab_folder / "summary.json"])
    assert [run.model for run in folder] == list(PHASES)
    assert [[x.report for x in run.results] for run in folder] == [[x.report for x in run.results] for run in summary]
    assert all(result.scores is None for run in summary for result in run.results)


def test_a_run_named_twice_counts_once_and_runs_of_one_model_get_names_of_their_own(lab_folder, tmp_path):
    shutil.copytree(lab_folder / BASELINE, tmp_path / "other")
    runs = load([lab_folder / BASELINE, tmp_path / "other", lab_folder])
    assert [run.model for run in runs] == [BASELINE, BASELINE, "full_attn_1kv"]
    assert len({run.name for run in runs}) == 3
    assert str(tmp_path / "other") in runs[1].name and runs[2].name == "full_attn_1kv"


def test_one_report_is_a_run_and_nan_is_null(report, tmp_path):
    report["validation_loss"] = float("nan")
    (tmp_path / "report.json").write_text(json.dumps(report))
    (run,) = load([tmp_path / "report.json"])
    assert run.results[0].report["validation_loss"] is None


@pytest.mark.parametrize(
    "change, complaint",
    [
        ({"accuracy": [0.5] * 23}, "accuracy is not 24 numbers"),
        ({"accuracy": [float("nan")] * 24}, "accuracy is not 24 numbers"),
        ({"gap_interval": None}, "gap_interval is not a pair of numbers"),
        ({"verdict": "maybe"}, "verdict is not one of"),
        ({"S": 5}, "S is not a divisor of residues"),
        ({"worst_residue": 24}, "worst_residue is not a residue"),
        ({"n_logical": 0}, "n_logical is not 1 or more"),
        ({"model": 3}, "model is not text or null"),
        ({"nll": "low"}, "nll is not 24 numbers or null"),
    ],
)
def test_a_report_with_a_wrong_field_is_refused_by_name(report, tmp_path, change, complaint):
    (tmp_path / "report.json").write_text(json.dumps(report | change))
    with pytest.raises(UserError, match=f"report.json is no report of phase-jax: {complaint}.*reproduce"):
        load([tmp_path / "report.json"])


@pytest.mark.parametrize("content", ["", "[1, 2]", "{}", '{"reports": []}', '{"reports": 4}', "nonsense"])
def test_a_json_that_is_no_report_is_refused(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(UserError, match=r"x\.json"):
        load([tmp_path / "x.json"])


def test_folders_without_results_are_refused(lab_folder, tmp_path):
    with pytest.raises(UserError, match="no such file or folder"):
        load([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="is no run folder"):
        load([tmp_path])
    shutil.copytree(lab_folder / BASELINE, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "evaluations")
    for path in (tmp_path / "run", tmp_path):
        with pytest.raises(UserError, match=r"measured.*; run phase-jax evaluate --workdir .*run"):
            load([path])


def test_prompts_of_another_report_are_refused(lab_folder, tmp_path):
    shutil.copytree(lab_folder / BASELINE, tmp_path / "run")
    other = lab_folder / "full_attn_1kv" / "evaluations" / "prefix.npz"
    shutil.copy(other, tmp_path / "run" / "evaluations" / "prefix.npz")
    with pytest.raises(UserError, match=r"prefix\.npz does not belong to the report"):
        load([tmp_path / "run"])
    (tmp_path / "run" / "evaluations" / "prefix.npz").write_bytes(b"PK\x03\x04 broken")
    with pytest.raises(UserError, match=r"prefix\.npz is not readable"):
        load([tmp_path / "run"])
