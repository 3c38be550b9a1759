"""phase-jax sweep: every run a folder, one table over all, and the commands for a pod."""

import json

import pytest

from experiments import cli, sweep

CONFIG = """
from configs.family import as_config_dict
from tests.runs import tiny_run

def get_config(variant):
    train = {"steps": 6, "first_layer_weight": 0.0}
    return as_config_dict(tiny_run(variant, train=train, data={"curriculum": ((1.0, 4, 28),)}))
"""
# Two ids of one architecture, which is compiled once.
ONE, OTHER = "kvc_w8s8_1kv_baseline", "kvc_w8s8_1kv_baseline_seed43"


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
    code, out, err = run("--ids", ONE, "--seeds", "5", "6", "--vmap-seeds")
    assert code == 0 and "2 seeds together took" in err
    code, out, _ = run("--ids", OTHER, "--seeds", "5")
    assert code == 0 and f" {ONE} " in out and f" {OTHER} " in out
    rows = json.loads((tmp_path / "runs" / "summary.json").read_text())["rows"]
    assert [(row["model"], row["seeds"]) for row in rows] == [(ONE, [5, 6]), (OTHER, [5])]
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
    assert run("--ids", ONE, "--seeds", "5", "6", "--vmap-seeds")[0] == 0


def test_the_table_shows_where_there_is_no_stride_and_no_period():
    numbers = {"mean": [0.9, 0.8], "worst": [0.5, 0.4], "gap": [0.1, 0.2], "validation_loss": [0.25, 0.5]}
    row = {"model": "full_attn_1kv", "protocol": "prefix", "S": None, "seeds": [5, 6], "period": [None, 4], **numbers}
    table = sweep.table([row | {"verdict": ["not seen", "sensitive"]}])
    cells = [next(iter(column.cells)) for column in table.columns]
    assert cells == "full_attn_1kv|prefix|5 6|90 80|50 40|10 20|– 4|–|not seen, sensitive|0.25 0.50".split("|")


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
