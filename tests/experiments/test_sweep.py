"""phase-jax sweep: every run a folder, one table over all, and the commands for a pod."""

import json

import pytest

from experiments import cli, sweep

CONFIG = """
from configs.family import as_config_dict
from tests.runs import tiny_run

def get_config(variant):
    return as_config_dict(tiny_run(variant, train={"steps": 6}, data={"curriculum": ((1.0, 4, 28),)}))
"""


@pytest.fixture
def run(tmp_path, capsys):
    (tmp_path / "tiny.py").write_text(CONFIG)

    def sweep(*arguments):
        place = f"--workdir={tmp_path / 'runs'}"
        code = cli.main(
            ["sweep", f"--config={tmp_path / 'tiny.py'}", place, "--logical=6", "--protocols=prefix", *arguments]
        )
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return sweep


@pytest.mark.slow
def test_a_sweep_measures_every_run_and_goes_on_where_it_was(run, tmp_path, monkeypatch):
    code, out, err = run("--ids", "kvc_w4s4_1kv", "--seeds", "5", "6", "--vmap-seeds")
    assert code == 0 and "2 seeds together took" in err
    code, out, _ = run("--ids", "full_attn_1kv", "--seeds", "5")
    assert code == 0 and "full_attn_1kv" in out and "kvc_w4s4_1kv" in out
    rows = json.loads((tmp_path / "runs" / "summary.json").read_text())["rows"]
    assert [(row["model"], row["seeds"]) for row in rows] == [("full_attn_1kv", [5]), ("kvc_w4s4_1kv", [5, 6])]
    for row in rows:
        for i, seed in enumerate(row["seeds"]):
            folder = tmp_path / "runs" / row["model"] / f"seed{seed}"
            report = json.loads((folder / "evaluations" / "prefix.json").read_text())
            assert (row["mean"][i], row["gap"][i]) == (report["mean"], report["gap"])
            assert json.loads((folder / "config.json").read_text())["seed"] == seed

    def never(*_):
        raise AssertionError("what is done is done again")

    monkeypatch.setattr("phase_jax.training.loop._run_steps", never)
    monkeypatch.setattr("phase_jax.evaluation.sweep.sweep", never)
    monkeypatch.setattr(sweep, "together_over_apart", never)
    assert run("--ids", "kvc_w4s4_1kv", "--seeds", "5", "6", "--vmap-seeds")[0] == 0


def test_the_commands_for_a_pod_name_every_run_and_start_nothing(run, tmp_path):
    code, out, _ = run(
        "--ids", "kvc_w4s4_1kv", "full_attn_1kv", "--seeds", "5", "6", "--config.train.batch=8", "--print-launch"
    )
    lines = out.splitlines()
    assert code == 0 and len(lines) == 4
    assert "--worker=all" in lines[0] and "tiny.py:kvc_w4s4_1kv --config.train.batch=8 --config.seed=5" in lines[0]
    assert lines[3].endswith("runs/full_attn_1kv/seed6 --pod'")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ids", "kvc_w4s5_1kv"], "kvc_w4s4_1kv"),
        (["--ids", "kvc_w4s4_1kv", "--seeds", "5", "5"], "name each once"),
        (["--ids", "kvc_w4s4_1kv", "--logical=0"], "at least one logical sample"),
        (["--ids", "kvc_w4s4_1kv", "--config.train.stps=4"], "stps"),
    ],
)
def test_mistakes_are_one_line(run, tmp_path, arguments, said):
    code, out, err = run(*arguments)
    assert code == 2 and out == "" and said in err and len(err.splitlines()) == 1
    assert not (tmp_path / "runs").exists()
