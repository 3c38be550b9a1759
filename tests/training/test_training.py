"""Training learns, compiles once a shape, and goes on after any stop as if nothing had happened."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import lab
from experiments import cli
from phase_jax.data.recall import batch_for_step
from phase_jax.errors import UserError
from phase_jax.model import Transformer
from phase_jax.run import RunConfig, RunFolder
from phase_jax.training import feed, loop
from phase_jax.training.optimizer import OptimizerConfig, make_optimizer
from phase_jax.training.step import init_state, make_train_step, recall_loss
from tests.runs import STEPS, tiny_run

ROOT = Path(__file__).parents[2]


class Stopped(Exception):
    """Stands for anything that ends a process in the middle of training."""


def rows(folder):
    """What metrics.jsonl says, without the speed."""
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines]


def assert_same_run(config, folder, other):
    """Losses and final parameters are equal bit for bit."""
    assert rows(folder) == rows(other)
    jax.tree.map(np.testing.assert_array_equal, loop.load_params(config, folder), loop.load_params(config, other))
    losses = [json.loads(f.training.read_text())["validation_loss"] for f in (folder, other)]
    assert losses[0] == losses[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing stopped, and the jitted steps that it made."""
    folder, steps = RunFolder(tmp_path_factory.mktemp("whole")), []
    with pytest.MonkeyPatch.context() as patch:
        watch_steps(patch, steps)
        loop.train(tiny_run(), folder)
    return folder, steps


def watch_steps(monkeypatch, steps):
    def watched(*args):
        steps.append(make_train_step(*args))
        return steps[-1]

    monkeypatch.setattr(loop, "make_train_step", watched)


def at_step(step, happens):
    """`batch_for_step` that lets something happen before the batch of a step is made."""

    def batch(config, size, now, *rest):
        if now == step:
            happens()
        return batch_for_step(config, size, now, *rest)

    return batch


def stop():
    raise Stopped


@pytest.mark.parametrize("variant", ["full_attn_1kv", "kvc_w8s4", "kvc_w4s4_1kv", "kvc_w8s8_1kv_baseline"])
def test_the_first_loss_is_that_of_a_uniform_guess(variant):
    config = RunConfig.from_dict(lab.get_config(variant).to_dict())
    model = Transformer(config.model)

    @jax.jit
    def first_loss(key):
        params = model.init(key, jnp.zeros((1, 16), jnp.int32))["params"]
        return recall_loss(model, params, batch_for_step(config.data, 16, 0, 1, key))[0]

    assert float(first_loss(jax.random.key(0))) == pytest.approx(math.log(config.data.vocabulary.size), rel=0.05)


# The first layer's own loss cannot go to zero (it names two tokens with one distribution) and keeps pulling.
@pytest.mark.parametrize(("first_layer_weight", "left"), [(0.0, 0.01), (0.2, 0.05)])
def test_one_batch_is_learnt_by_heart(first_layer_weight, left):
    config = tiny_run()
    model, optimizer = Transformer(config.model), make_optimizer(OptimizerConfig(3e-2, warmup_steps=10), 300)
    state = init_state(model, optimizer, jax.random.key(0))
    batch = batch_for_step(config.data, 4, 0, 1, jax.random.key(1))
    step = make_train_step(model, optimizer, first_layer_weight)
    for _ in range(300):
        state, metrics = step(state, batch)
    assert metrics["loss"] < left and metrics["accuracy"] == 1
    assert step._cache_size() == 1
    assert int(state.step) == 300


def test_the_loss_counts_the_queried_names_alone():
    config = tiny_run()
    model = Transformer(config.model)
    params = model.init(jax.random.key(0), jnp.zeros((1, 16), jnp.int32))["params"]
    params = jax.tree.map(lambda x: 3 * x, params)
    batch = batch_for_step(config.data, 4, 0, 1, jax.random.key(1))
    logits = np.float64(model.apply({"params": params}, batch.tokens))
    tokens, expected, hits = np.asarray(batch.tokens), [], []
    first_query = tokens.shape[1] - 2 * config.data.queries
    for row, predicted in zip(tokens, logits, strict=True):
        for t in range(first_query, tokens.shape[1], 2):
            expected.append(np.log(np.exp(predicted[t]).sum()) - predicted[t][row[t + 1]])
            hits.append(predicted[t].argmax() == row[t + 1])
    loss, accuracy = recall_loss(model, params, batch)
    assert float(loss) == pytest.approx(np.mean(expected), rel=1e-5)
    assert float(accuracy) == pytest.approx(np.mean(hits))


@pytest.mark.slow
def test_training_writes_what_it_did(whole):
    folder, _ = whole
    assert [row["step"] for row in rows(folder)] == list(range(1, STEPS + 1))
    assert all(math.isfinite(row[name]) for row in rows(folder) for name in ("loss", "accuracy", "grad_norm"))
    result = json.loads(folder.training.read_text())
    assert result["steps"] == STEPS and math.isfinite(result["validation_loss"])
    assert folder.read_config() == tiny_run()
    assert sorted(int(p.name) for p in folder.checkpoints.iterdir() if p.name.isdigit()) == [4, 8, 12]


def test_one_compilation_for_each_shape_of_the_curriculum(whole):
    _, (step,) = whole
    assert step._cache_size() == 2


@pytest.mark.slow
def test_a_run_that_broke_off_goes_on_as_if_nothing_had_happened(whole, tmp_path, monkeypatch):
    folder, steps = RunFolder(tmp_path / "run"), []
    with monkeypatch.context() as patch:
        patch.setattr(feed, "batch_for_step", at_step(10, stop))
        with pytest.raises(Stopped):
            loop.train(tiny_run(), folder)
    assert [row["step"] for row in rows(folder)][-1] >= 9, "metrics reach beyond the last checkpoint"
    with open(folder.metrics, "a") as metrics:
        metrics.write('{"step": 11, "los')  # as a kill in the middle of a write leaves it
    watch_steps(monkeypatch, steps)
    assert loop.train(tiny_run(), folder)["resumed_from"] == 8
    assert_same_run(tiny_run(), folder, whole[0])
    assert steps[0]._cache_size() == 1


def test_a_run_that_broke_off_before_its_first_checkpoint_starts_again(whole, tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(feed, "batch_for_step", at_step(2, stop))
        with pytest.raises(Stopped):
            loop.train(tiny_run(), folder)
    loop.train(tiny_run(), folder)
    assert_same_run(tiny_run(), folder, whole[0])


CONFIG_FILE = """
from configs.family import as_config_dict
from tests.runs import tiny_run

def get_config(variant):
    return as_config_dict(tiny_run(variant))
"""

KILLED_AT_STEP_10 = """
import os, signal, sys
from experiments import cli
from phase_jax.training import feed, loop
from tests.training.test_training import at_step
feed.batch_for_step = at_step(10, lambda: os.kill(os.getpid(), signal.SIGKILL))
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture
def command(tmp_path):
    """Arguments of `phase-jax train` for the tiny run, and its folder."""
    file = tmp_path / "tiny.py"
    file.write_text(CONFIG_FILE)
    folder = RunFolder(tmp_path / "run")
    return ["train", f"--config={file}:kvc_w4s4_1kv", f"--workdir={folder.path}"], folder


@pytest.mark.slow
def test_a_killed_command_goes_on_as_if_nothing_had_happened(whole, command):
    arguments, folder = command
    killed = subprocess.run(
        [sys.executable, "-c", KILLED_AT_STEP_10, *arguments], cwd=ROOT, env=os.environ, capture_output=True, text=True
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert not folder.training.exists()
    assert cli.main(arguments) == 0
    assert json.loads(folder.training.read_text())["resumed_from"] == 8
    assert_same_run(tiny_run(), folder, whole[0])


@pytest.mark.slow
def test_ctrl_c_saves_says_so_and_exits_130(whole, command, monkeypatch, capfd):
    arguments, folder = command
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        patch.setattr(feed, "batch_for_step", at_step(5, lambda: signal.raise_signal(signal.SIGINT)))
        assert cli.main(arguments) == 130
    assert signal.getsignal(signal.SIGINT) is before
    assert (folder.checkpoints / "6").exists() and not folder.training.exists()
    monkeypatch.setattr(feed, "batch_for_step", batch_for_step)
    assert cli.main(arguments) == 0
    assert json.loads(folder.training.read_text())["resumed_from"] == 6
    assert_same_run(tiny_run(), folder, whole[0])


def test_a_loss_that_is_no_number_stops_with_one_clear_line(command, capfd):
    arguments, folder = command
    rate = "--config.train.optimizer.learning_rate=1e6"
    assert cli.main([*arguments, rate, "--config.train.optimizer.warmup_steps=0"]) == 2
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("phase-jax: ")]
    assert len(said) == 1 and "lower --config.train.optimizer.learning_rate" in said[0]
    assert not folder.training.exists()
    assert all(math.isfinite(row["loss"]) for row in rows(folder))


def test_a_folder_of_another_configuration_is_refused_and_left_alone(whole, tmp_path):
    shutil.copytree(whole[0].path, tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    before = {p: p.read_bytes() for p in folder.path.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match=r"another configuration \(train.batch is 4, not 5\): choose another --workdir"):
        loop.train(tiny_run(train={"batch": 5}), folder)
    assert {p: p.read_bytes() for p in folder.path.rglob("*") if p.is_file()} == before


def test_a_folder_of_other_things_is_refused(tmp_path):
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(UserError, match="is not empty and holds no run"):
        loop.train(tiny_run(), RunFolder(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["letter.txt"]


def test_a_trained_run_is_reused(whole, command, monkeypatch, capsys):
    arguments, folder = command
    shutil.copytree(whole[0].path, folder.path)
    monkeypatch.setattr(loop, "make_train_step", lambda *_: pytest.fail("trained again"))
    assert cli.main(arguments) == 0
    assert "was trained before; nothing to do" in capsys.readouterr().out
