"""The verb `text`: corpus, runs, table and figure from nothing, and reuse of what is done."""

import json
import math

import pytest

from experiments import cli
from experiments.text import text_run
from phase_jax.run import RunFolder


@pytest.mark.slow
def test_text_trains_and_compares_from_nothing_and_then_reuses(tmp_path, capsys):
    command = ["text", "--models", "kvc_w4s4_1kv", "--steps", "2", "--workdir", str(tmp_path)]
    assert cli.main(command) == 0
    (row,) = json.loads((tmp_path / "summary.json").read_text())["rows"]
    assert row["tokens"] == 2 * 16 * 256 and row["held_out_tokens"] % 256 == 0 and row["held_out_tokens"] > 20_000
    assert 4 < row["validation_loss"] < math.log(258) + 0.2, "two steps learn how often each byte comes"
    assert row["bits_per_byte"] == pytest.approx(row["validation_loss"] / math.log(2))
    folder = RunFolder(tmp_path / "kvc_w4s4_1kv")
    assert folder.read_config() == text_run("kvc_w4s4_1kv", tmp_path / "corpus", steps=2)
    assert (tmp_path / "losses.svg").stat().st_size and (tmp_path / "losses.png").stat().st_size
    before = folder.metrics.read_bytes()
    assert cli.main(command) == 0
    assert folder.metrics.read_bytes() == before
    assert cli.main(["evaluate", "--workdir", str(folder.path)]) == 2
    assert "was trained on text" in capsys.readouterr().err
