"""phase-jax flip: from a run to numbers, a figure and a sentence; mistakes as one line."""

import json

import pytest

from experiments import cli
from tests.model.tiny import draw_params
from tests.runs import as_if_trained

BYTES = ("--tokenizer", "bytes")


def flip(*arguments):
    return cli.main(["flip", *map(str, arguments)])


def contents(folder):
    return sorted(path for path in folder.rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "period"), [("kvc_w4s4_1kv", 4), ("full_attn_1kv", None)])
def test_a_model_that_knows_nothing_has_the_period_of_its_stride_alone(variant, period, tmp_path, monkeypatch, capsys):
    """Random parameters do not prefer what is right, but what they prefer depends on the phase, and on nothing else."""
    folder = as_if_trained(tmp_path / "run", variant, model={"vocabulary": 258})
    monkeypatch.setattr("phase_jax.training.loop.load_params", lambda config, folder: draw_params(config.model))
    template = tmp_path / "code.v2.txt"
    template.write_text("# {filler}\nwidth = 8\nheight = 16\narea = width * ")
    assert flip("--workdir", folder.path, *BYTES, "--template", template, "--right", "height", "--wrong", "width") == 0
    out = folder.path / "flip"
    assert {path.name for path in out.iterdir()} == {"code.v2.json", "code.v2.png", "code.v2.svg"}
    report = json.loads((out / "code.v2.json").read_text())
    assert report["period"] == period
    assert (report["model"], report["S"], report["tokenizer"]) == (variant, period, "bytes")
    assert (report["right_text"], report["wrong_text"]) == ("height", "width")
    assert report["lengths"] == list(range(24, 40)) and len(report["families"]) == 4
    for family in report["families"]:
        assert len(family["right"]) == len(family["wrong"]) == len(family["log_odds"]) == 16
    said = capsys.readouterr().out
    assert report["sentence"] in said and "code.v2.svg" in said
    assert "<svg" in (out / "code.v2.svg").read_text()[:2000]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "was trained on the recall task, not on text; --tokenizer names one"),
        ([*BYTES, "--template", "nowhere.txt", "--right", "a", "--wrong", "b"], "nowhere.txt: cannot be read as text"),
        ([*BYTES, "--template", "{template}"], "--template needs --right and --wrong"),
        (
            [*BYTES, "--template", "{template}", "--right", "a", "--wrong", "b"],
            "the template has 0 slots: write {fill",
        ),
        ([*BYTES, "--right", ""], "the right continuation is empty"),
        ([*BYTES, "--lengths", "24:38"], "--lengths 24:38: a period needs 16 lengths or more in a row"),
        ([*BYTES, "--lengths", "24"], "--lengths 24: write first:last, for example 24:39"),
        ([*BYTES, "--fillers", "equal"], "unknown filler 'equal'; did you mean 'equals'?"),
        (["--tokenizer", "byte"], "tokenizer 'byte': choose bytes"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(arguments, said, tmp_path, capsys):
    folder = as_if_trained(tmp_path / "run", model={"vocabulary": 258})
    template = tmp_path / "template.txt"
    template.write_text("no slot\n")
    before = contents(tmp_path)
    arguments = [str(template) if argument == "{template}" else argument for argument in arguments]
    assert flip("--workdir", folder.path, *arguments) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert said in line and printed.out == ""
    assert contents(tmp_path) == before


def test_a_run_of_another_vocabulary_or_without_checkpoint_is_refused(tmp_path, capsys):
    small = as_if_trained(tmp_path / "small")
    assert flip("--workdir", small.path, *BYTES) == 2
    assert "its model has 19 token ids, tokenizer 'bytes' 258: it was trained on another" in capsys.readouterr().err
    empty = as_if_trained(tmp_path / "empty", model={"vocabulary": 258})
    assert flip("--workdir", empty.path, *BYTES) == 2
    assert "holds no checkpoint yet: continue it with phase-jax train" in capsys.readouterr().err
    assert flip("--workdir", tmp_path / "nothing", *BYTES) == 2
    assert "holds no run" in capsys.readouterr().err
