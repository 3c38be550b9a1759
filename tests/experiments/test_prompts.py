"""phase-jax prompts: a file from nothing, its check, and mistakes as one line that leave nothing behind."""

import dataclasses

import numpy as np
import pytest

from experiments import cli, prompts
from phase_jax.data.padding import PROTOCOLS
from phase_jax.data.positions import in_slot, matched_slot_starts, matching
from phase_jax.data.promptfile import read_prompts
from tests.data.test_tokenizers import SHIPPED, loaded


@pytest.fixture(autouse=True)
def _load_a_vocabulary_once(monkeypatch):
    monkeypatch.setattr(prompts, "load_tokenizer", loaded)


def run(*arguments):
    return cli.main(["prompts", *map(str, arguments)])


def refused(capsys, *arguments):
    assert run(*arguments) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert printed.out == "" and line.startswith("phase-jax: ")
    return line


NEEDLE = ("--task", "needle", "--tokens", 1024, "--records", 100, "--samples", 8, "--closing-filler", 32)
RECORDS = ("--task", "records", "--samples", 2)


@pytest.mark.parametrize("name", SHIPPED[:1])
def test_every_padding_at_the_commands_own_sizes(name, tmp_path, capsys):
    for protocol, task in zip(PROTOCOLS, (NEEDLE, RECORDS, NEEDLE), strict=True):
        out = tmp_path / f"{protocol}.npz"
        assert run(*task, "--protocol", protocol, "--tokenizer", name, "--out", out) == 0
        said = capsys.readouterr().out
        assert "positions DO NOT MATCH to 1 % (take more samples) over residues: means within" in said
        assert "million a second, peak memory" in said
        found, manifest = read_prompts(out)
        assert (manifest["protocol"], manifest["task"], manifest["tokenizer"]["name"]) == (protocol, task[1], name)
        assert found.tokens.shape == ((8, 8, 1024) if task is NEEDLE else (2, 24, 256))
        assert found.record_position.shape[2] == (100 if task is NEEDLE else 64)
        assert run("--check", out) == 0
        assert f"{out} is whole" in capsys.readouterr().out


@pytest.mark.parametrize("name", SHIPPED[:1])
def test_token_zero_is_what_is_asked_for(name, tmp_path):
    first = {}
    for bos in ("none", "end-of-text"):
        assert run(*NEEDLE, "--bos", bos, "--out", tmp_path / "p.npz") == 0
        found, manifest = read_prompts(tmp_path / "p.npz")
        first[bos] = found.tokens
        assert manifest["bos"] == {"none": None, "end-of-text": 151_643}[bos]
    assert (first["end-of-text"][..., 0] == 151_643).all() and not (first["none"] == 151_643).any()
    np.testing.assert_array_equal(first["none"][..., 1:], first["end-of-text"][..., 1:])


@pytest.mark.parametrize("name", SHIPPED[:1])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((*NEEDLE, "--records", 300), r"--tokens 1024: 300 records of 4 tokens on 8 residues"),
        ((*NEEDLE, "--keys", "numeric"), "--records 100: keys are drawn without replacement, and the tokenizer has 10"),
        ((*NEEDLE, "--bos", "own"), "--bos own: tokenizer 'qwen' has no such token"),
        ((*NEEDLE, "--tokenizer", "no.json"), "tokenizer 'no.json': choose bytes, deepseek, qwen or the path"),
        ((*NEEDLE, "--tokenizer", "bytes"), "tokenizer 'bytes' has no words of one token"),
        ((*NEEDLE, "--tokenizer", __file__), "is not a tokenizer.json"),
        ((*NEEDLE, "--keys", "no.txt"), "no.txt is no list of words"),
        ((*RECORDS, "--records", 100), "--records 100: keys are drawn without replacement, and the tokenizer has 93"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(name, arguments, said, tmp_path, capsys):
    assert said in refused(capsys, *arguments, "--out", tmp_path / "p.npz")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", SHIPPED[:1])
def test_a_word_of_two_tokens_is_named(name, tmp_path, capsys):
    (tmp_path / "animals.txt").write_text("fox\nhippopotamus\n")
    line = refused(capsys, *RECORDS, "--keys", tmp_path / "animals.txt", "--out", tmp_path / "p.npz")
    assert "' hippopotamus' is 3 tokens of tokenizer 'qwen', not one" in line
    assert [file.name for file in tmp_path.iterdir()] == ["animals.txt"]


@pytest.mark.parametrize("name", SHIPPED[:1])
def test_a_file_made_with_another_vocabulary_is_told(name, tmp_path, capsys, monkeypatch):
    out = tmp_path / "p.npz"
    assert run(*NEEDLE, "--out", out) == 0
    out.write_bytes(out.read_bytes()[:-1])
    capsys.readouterr()
    assert "no whole file of prompts" in refused(capsys, "--check", out)
    assert run(*NEEDLE, "--out", out) == 0
    capsys.readouterr()
    assert run("--check", out, "--tokenizer", "bytes") == 2
    assert "was made with another vocabulary than tokenizer 'bytes'" in capsys.readouterr().err
    monkeypatch.setattr(prompts, "load_tokenizer", lambda name: dataclasses.replace(loaded(name), hash="other"))
    assert run("--check", out) == 2
    assert "was made with another vocabulary than tokenizer 'qwen'" in capsys.readouterr().err


def test_out_or_check_is_needed(capsys):
    assert "one of the arguments --out --check is required" in refused(capsys, "--task", "needle")


@pytest.mark.parametrize(("n", "said"), [(1000, "match over"), (26, "DO NOT MATCH to 1 % (take more samples) over")])
def test_what_is_said_of_positions_is_what_was_found(n, said):
    position = in_slot(matched_slot_starts(n, 24), 24)
    sizes = {"samples": n, "residues": 24, "tokens": 256, "records": 64, "protocol": "prefix"}
    line = prompts.summary({**sizes, "tokenizer": {"name": "qwen"}, "checks": matching(position)})
    variance = np.var(position, axis=0)
    found = 100 * np.abs(variance / variance.mean() - 1).max()
    assert f"target positions {said} residues: means within" in line and line.endswith(
        f"variances within {found:.2g} %"
    )
