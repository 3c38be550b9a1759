"""phase-jax bench transfer: pairs of runs that differ in where they begin, and what is read from their curves."""

import json

import pytest

from experiments import cli
from experiments.bench_transfer import compare
from phase_jax.run import RunFolder
from tests.experiments.test_sweep import CONFIG


def test_steps_are_the_first_at_a_loss():
    scratch = {10: 4.0, 20: 3.5, 30: 2.9, 40: 2.0}
    assert compare(scratch, {10: 3.0, 20: 2.5, 30: 3.1, 40: 2.2}) == {
        "levels": {"half": 3.0, "whole": 2.0},
        "steps": {"half": [30, 10], "whole": [40, None]},
        "last_loss": [2.0, 2.2],
    }


@pytest.mark.slow
def test_twins_differ_in_where_they_begin_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    (tmp_path / "tiny.py").write_text(CONFIG)
    place = tmp_path / "runs"
    command = ["bench", "transfer", f"--config={tmp_path / 'tiny.py'}", "--ids", "kvc_w4s4_1kv", "--seeds", "5"]
    assert cli.main([*command, "--every=2", f"--workdir={place}"]) == 0
    (row,) = json.loads((place / "transfer.json").read_text())["rows"]
    configs, losses = {}, {}
    for name in ("scratch", "from-full"):
        folder = RunFolder(place / name / "kvc_w4s4_1kv" / "seed5")
        configs[name] = folder.read_config().to_dict()
        lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
        assert [line["step"] for line in lines if "validation_loss" in line] == [2, 4, 6]
        losses[name] = lines[-1]["validation_loss"]
    assert configs["from-full"]["train"].pop("init_from") == str(place / "full_attn_1kv" / "seed5")
    assert configs["scratch"]["train"].pop("init_from") is None and configs["scratch"] == configs["from-full"]
    assert (row["model"], row["seed"], row["last_loss"]) == ("kvc_w4s4_1kv", 5, list(losses.values()))
    assert losses["scratch"] != losses["from-full"] and "kvc_w4s4_1kv" in capsys.readouterr().out
