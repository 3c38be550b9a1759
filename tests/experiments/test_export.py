"""phase-jax export: a run's model in transformers, and measured from its folder as from the run."""

import json

import jax
import numpy as np
import pytest

from experiments import cli
from phase_jax.model import Transformer, qwen3
from phase_jax.run import RunFolder
from phase_jax.training import loop
from tests.experiments.test_evaluate import prompts_file
from tests.runs import tiny_run

STILL = {"steps": 1, "checkpoint_every": 1, "validation_batches": 1}


@pytest.fixture(autouse=True)
def _keep_the_compilation_cache_of_the_user_out_of_it(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "compiled"))


def export(workdir, out, *more):
    return cli.main(["export", f"--workdir={workdir}", f"--out={out}", *more])


def evaluated(folder, file):
    assert cli.main(["evaluate", f"--workdir={folder}", f"--prompts={file}"]) == 0
    with np.load(folder / "evaluations" / f"prompts-{file.stem}.npz") as scores:
        return dict(scores)


@pytest.mark.slow
def test_an_exported_run_is_the_same_model_in_transformers_and_here(tmp_path, capsys):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    changes = {"vocabulary": 800, "tied_embeddings": False, "logit_scale": 1.7}
    config, run, out = tiny_run("full_attn_1kv", train=STILL, model=changes), tmp_path / "run", tmp_path / "hf"
    loop.train(config, RunFolder(run))
    assert export(run, out) == 0
    assert f"{out}: full_attn_1kv, float32" in capsys.readouterr().out
    tokens = np.random.default_rng(0).integers(0, 800, (2, 40))
    peer = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with torch.no_grad():
        wanted = peer(torch.tensor(tokens)).logits.numpy()
    found = Transformer(config.model).apply({"params": loop.load_params(config, RunFolder(run))}, tokens)
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert np.abs(wanted).max() > 0.1

    file = prompts_file(tmp_path / "p.npz")
    of_run, of_folder = evaluated(run, file), evaluated(out, file)
    np.testing.assert_allclose(of_folder["nll"], of_run["nll"], rtol=1e-5)
    report = json.loads((out / "evaluations" / "prompts-p.json").read_text())
    assert (report["model"], report["S"], report["validation_loss"]) == ("hf", None, None)

    (tmp_path / "empty").mkdir()
    assert export(run, tmp_path / "empty", "--dtype=bfloat16") == 0
    ours, theirs = (qwen3.read(folder)[1] for folder in (out, tmp_path / "empty"))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.astype("bfloat16").astype("float32"), b), ours, theirs)


def test_what_cannot_be_exported_is_one_line_and_nothing_is_written(tmp_path, capsys):
    def refused(said, *arguments):
        assert export(*arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line and not list(tmp_path.glob("hf*"))

    run, out = tmp_path / "run", tmp_path / "hf"
    refused("holds no run", run, out)
    RunFolder(run).claim(tiny_run())
    refused("compressed attention (W4/S4) is no Qwen3: only full attention, such as a run of full_attn_1kv", run, out)
    RunFolder(tmp_path / "other").claim(tiny_run("full_attn_1kv", model={"qk_norm": False}))
    refused("a model with qk_norm False", tmp_path / "other", out)
    RunFolder(tmp_path / "full").claim(tiny_run("full_attn_1kv"))
    refused("exists: choose another folder", tmp_path / "full", run)
    refused("holds no checkpoint yet", tmp_path / "full", out)
    refused("float16", tmp_path / "full", out, "--dtype=float16")
    (tmp_path / "qwen").mkdir()
    (tmp_path / "qwen" / "config.json").write_text('{"model_type": "qwen3"}')
    refused("is no run's configuration", tmp_path / "qwen", out)
