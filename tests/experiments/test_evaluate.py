"""phase-jax evaluate: prompts of a file, and evaluations that fail in part and go on."""

import json

import jax
import numpy as np
import pytest

from experiments import cli
from experiments.evaluate import evaluate_run
from phase_jax.data.promptfile import write_prompts
from phase_jax.data.tokenizers import ByteTokenizer
from phase_jax.errors import UserError
from phase_jax.evaluation import sweep
from phase_jax.model import Transformer
from phase_jax.reports.results import load
from tests.data.test_tasks import made
from tests.model.tiny import draw_params
from tests.runs import as_if_trained


@pytest.fixture(autouse=True)
def _parameters_that_no_training_made(monkeypatch):
    monkeypatch.setattr("phase_jax.training.loop.load_params", lambda config, folder: draw_params(config.model))


def prompts_file(path, **sizes):
    write_prompts(path, made(tokens=240, records=40, **sizes), ByteTokenizer(), {"task": "needle"}, lambda count: None)
    return path


def test_prompts_of_a_file_are_scored_as_plain_forward_passes_do(tmp_path, monkeypatch, capsys):
    folder, file = as_if_trained(tmp_path / "run", model={"vocabulary": 800}), prompts_file(tmp_path / "my.file.npz")
    assert cli.main(["evaluate", "--workdir", str(folder.path), "--prompts", str(file)]) == 0
    assert "kvc_w4s4_1kv needle prefix: mean" in capsys.readouterr().out
    assert {path.name for path in (folder.path / "evaluations").iterdir()} == {
        "prompts-my-file.json",
        "prompts-my-file.npz",
    }
    config, task = folder.read_config(), made(tokens=240, records=40)
    model, params = Transformer(config.model), draw_params(config.model)
    forward = jax.jit(lambda tokens: model.apply({"params": params}, tokens, last_only=True))
    stored = folder.path / "evaluations" / "prompts-my-file"
    report = json.loads(stored.with_suffix(".json").read_text())
    assert (report["n_logical"], report["residues"], report["prompt_length"]) == (12, 8, 240)
    with np.load(stored.with_suffix(".npz")) as scores:
        for i, sample in enumerate(task):
            logits = np.float64(forward(sample.tokens))
            nll = np.log(np.exp(logits).sum(axis=-1)) - logits[:, sample.answer]
            np.testing.assert_allclose(scores["nll"][i], nll, rtol=1e-5)
            np.testing.assert_array_equal(scores["correct"][i], logits.argmax(axis=-1) == sample.answer)
        np.testing.assert_array_equal(scores["target_position"], task.placement.position)
        np.testing.assert_allclose(report["nll"], scores["nll"].mean(axis=0), rtol=1e-5)

        assert cli.main(["evaluate", "--workdir", str(folder.path), "--prompts", str(file)]) == 0
        assert "(measured before)" in capsys.readouterr().out
        # Prompts that are long are scored one by one: the same numbers.
        monkeypatch.setattr(sweep, "TOKENS", 2 * 240)
        copy = file.rename(tmp_path / "again.npz")
        assert cli.main(["evaluate", "--workdir", str(folder.path), "--prompts", str(copy)]) == 0
        with np.load(stored.with_name("prompts-again.npz")) as again:
            for name in scores:
                np.testing.assert_allclose(again[name], scores[name], rtol=1e-5, err_msg=name)


def test_an_answer_that_is_generated_is_read_as_text(tmp_path, monkeypatch, capsys):
    """Against a forward pass a prompt, then one over prompt and answer; each value is a word that others begin with."""
    folder, file = as_if_trained(tmp_path / "run", model={"vocabulary": 800}), prompts_file(tmp_path / "p.npz")

    class Words:
        hash = ByteTokenizer.hash

        def decode(self, ids):
            return "".join(f" {'abc'[i % 3]}" if n == 0 else "abc"[i % 3] for n, i in enumerate(map(int, ids)))

    monkeypatch.setattr("experiments.prompts.load_tokenizer", lambda name: Words())
    command = ["evaluate", "--workdir", str(folder.path), "--prompts", str(file), "--generate", "2"]
    assert cli.main(command) == 0
    assert "kvc_w4s4_1kv needle prefix generated: mean" in capsys.readouterr().out
    config = folder.read_config()
    model, params = Transformer(config.model), draw_params(config.model)
    forward = jax.jit(lambda tokens: model.apply({"params": params}, tokens))
    with np.load(folder.path / "evaluations" / "prompts-p-generated.npz") as scores:
        for i, sample in enumerate(made(tokens=240, records=40)):
            generated = scores["generated"][i]
            logits = np.asarray(forward(np.concatenate([sample.tokens, generated], axis=1)), np.float64)
            np.testing.assert_array_equal(generated, logits[:, -3:-1].argmax(axis=-1))
            np.testing.assert_array_equal(scores["correct"][i], generated[:, 0] % 3 == sample.answer % 3)
            nll = np.log(np.exp(logits[:, -3]).sum(axis=-1)) - logits[:, -3, sample.answer]
            np.testing.assert_allclose(scores["nll"][i], nll, rtol=1e-4)
        assert 0.1 < scores["correct"].mean() < 0.9
    assert cli.main([*command[:-1], "0"]) == 2
    assert "--generate 0: at least one token is needed" in capsys.readouterr().err
    assert cli.main(["evaluate", "--workdir", str(folder.path), "--generate", "2"]) == 2
    assert "--generate goes with --prompts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({}, "has token ids up to 702, the model of {run} knows 19: it was trained on another vocabulary"),
        (
            {"variant": "kvc_w8s6", "model": {"vocabulary": 800}},
            "has 8 residues: {run} needs 2 or more, a multiple of its",
        ),
    ],
)
def test_prompts_that_are_not_for_this_run_are_refused(model, said, tmp_path, capsys):
    folder, file = as_if_trained(tmp_path / "run", **model), prompts_file(tmp_path / "p.npz")
    assert cli.main(["evaluate", "--workdir", str(folder.path), "--prompts", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said.format(run=folder.path) in line
    assert not (folder.path / "evaluations").exists()


def test_prompts_whose_records_the_exact_branch_reaches_are_refused(tmp_path, capsys):
    folder = as_if_trained(tmp_path / "run", model={"vocabulary": 800})
    command = ["evaluate", "--workdir", str(folder.path), "--prompts", str(tmp_path / "p.npz")]
    prompts_file(tmp_path / "p.npz", protocol="insequence", demonstrations=0, closing_filler=0)
    assert cli.main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "p.npz has a record 2 tokens before the end, within the 8 that the exact branch" in line
    assert line.endswith("--closing-filler 7 or more")
    prompts_file(tmp_path / "p.npz", protocol="insequence", demonstrations=0, closing_filler=7)
    assert cli.main(command) == 0


def test_a_prompt_file_that_is_cut_short_is_refused(tmp_path, capsys):
    folder, file = as_if_trained(tmp_path / "run", model={"vocabulary": 800}), prompts_file(tmp_path / "p.npz")
    file.write_bytes(file.read_bytes()[:-1000])
    assert cli.main(["evaluate", "--workdir", str(folder.path), "--prompts", str(file)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "p.npz is no whole file of prompts" in line


def test_a_failed_batch_leaves_no_result_and_the_next_run_completes_it(tmp_path, monkeypatch, capsys):
    folder, calls, fails = as_if_trained(tmp_path / "run"), [], True
    score = sweep.score

    def counted(model, vocabulary, params, tokens, answer):
        calls.append(len(answer))
        if fails and len(calls) == 2:
            raise MemoryError("RESOURCE_EXHAUSTED: out of memory")
        return score(model, vocabulary, params, tokens, answer)

    monkeypatch.setattr(sweep, "score", counted)
    with pytest.raises(UserError, match=r"4 of 12 logical samples are missing.* 8 to 11 .*RESOURCE_EXHAUSTED"):
        evaluate_run(folder, "target", 12)
    (left,) = (folder.path / "evaluations").iterdir()
    assert left.suffix == ".journal"
    fails = False
    report, reused = evaluate_run(folder, "target", 12)
    assert not reused and len(calls) == 3, "the batch that was there is not scored again"
    assert {path.name for path in left.parent.iterdir()} == {"target.json", "target.npz"}
    whole, _ = evaluate_run(as_if_trained(tmp_path / "other"), "target", 12)
    assert report == whole


def test_the_distance_is_drawn_and_no_report_takes_it_for_a_sweep(tmp_path, capsys):
    folder = as_if_trained(tmp_path / "run")
    evaluate_run(folder, "prefix", 6)
    for said in ("", "(measured before)"):
        assert cli.main(["evaluate", "--workdir", str(folder.path), "--distance", "--logical", "4"]) == 0
        assert said in capsys.readouterr().out
    assert {path.suffix for path in folder.distance.parent.iterdir()} == {".json", ".npz", ".png", ".svg"}
    assert [result.protocol for run in load([folder.path]) for result in run.results] == ["prefix"]
