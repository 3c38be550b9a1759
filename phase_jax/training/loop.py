"""Trains a run from its last checkpoint to its end."""

import json
import math
import time

import jax
import numpy as np

from phase_jax.data.recall import batch_for_step
from phase_jax.errors import UserError
from phase_jax.interrupt import deferred_interrupt
from phase_jax.model import Transformer
from phase_jax.progress import progress_bar
from phase_jax.run import RunConfig, RunFolder, read_json, write_atomically, write_json
from phase_jax.training import checkpoints as ckpt
from phase_jax.training.optimizer import make_optimizer
from phase_jax.training.step import TrainState, init_state, make_train_step, recall_loss

# Purposes of randomness: each is folded into the run's one seed.
_INIT, _TRAIN, _VALIDATE = range(3)


def purpose_key(seed: int, purpose: int) -> jax.Array:
    """The random key of one purpose of a run."""
    return jax.random.fold_in(jax.random.key(seed), purpose)


def train(config: RunConfig, folder: RunFolder) -> dict:
    """Trains, or continues, or finds it done; returns training.json's content.

    A run that was stopped at any point goes on from its last checkpoint with the same losses, since a batch is a
    function of (seed, step). On Ctrl-C the state is saved before KeyboardInterrupt is raised. Raises UserError where
    the folder holds another run, or the loss is no longer a number.
    """
    folder.claim(config)
    if folder.training.exists():
        return read_json(folder.training)
    model = Transformer(config.model)
    optimizer = make_optimizer(config.train.optimizer, config.train.steps)

    def fresh(key: jax.Array) -> TrainState:
        return init_state(model, optimizer, key)

    with ckpt.open_checkpoints(folder.checkpoints, config.train.keep_checkpoints) as saved:
        start = ckpt.latest_step(saved)
        if start is None:
            state = jax.jit(fresh)(purpose_key(config.seed, _INIT))
        else:
            state = ckpt.restore(saved, start, jax.eval_shape(fresh, jax.random.key(0)))
        _forget_after(folder, start or 0)
        began = time.perf_counter()
        train_step = make_train_step(model, optimizer, config.train.first_layer_weight)
        state = _run_steps(config, folder, train_step, state, saved)
    result = {
        "steps": config.train.steps,
        "validation_loss": validation_loss(model, state.params, config),
        "seconds": round(time.perf_counter() - began, 2),
        "resumed_from": start,
    }
    write_json(folder.training, result)
    return result


def load_params(config: RunConfig, folder: RunFolder, step: int | None = None) -> dict:
    """Parameters of the checkpoint of a step, or of the newest. Raises UserError where there is none."""
    model = Transformer(config.model)
    optimizer = make_optimizer(config.train.optimizer, config.train.steps)
    like = jax.eval_shape(lambda key: init_state(model, optimizer, key), jax.random.key(0))
    with ckpt.open_checkpoints(folder.checkpoints, config.train.keep_checkpoints) as saved:
        step = ckpt.latest_step(saved) if step is None else step
        if step is None:
            raise UserError(f"{folder.path} holds no checkpoint yet: continue it with phase-jax train")
        return ckpt.restore(saved, step, like).params


def saved_steps(config: RunConfig, folder: RunFolder) -> list[int]:
    """Steps of the checkpoints that are kept, oldest first."""
    with ckpt.open_checkpoints(folder.checkpoints, config.train.keep_checkpoints) as saved:
        return [checkpoint.step for checkpoint in saved.checkpoints]


def validation_loss(model: Transformer, params: dict, config: RunConfig) -> float:
    """Mean recall loss on batches of the last training stage that no step has seen."""
    key, train = purpose_key(config.seed, _VALIDATE), config.train
    loss = jax.jit(lambda params, batch: recall_loss(model, params, batch)[0])
    last = train.steps - 1
    batches = (
        batch_for_step(config.data, train.batch, last, train.steps, jax.random.fold_in(key, i))
        for i in range(train.validation_batches)
    )
    return float(np.mean([loss(params, batch) for batch in batches]))


def _run_steps(config: RunConfig, folder: RunFolder, train_step, state: TrainState, saved) -> TrainState:
    """Steps from the state's own to the last, with progress, metrics and checkpoints."""
    train, key = config.train, purpose_key(config.seed, _TRAIN)
    first = int(state.step)
    with (
        open(folder.metrics, "a", encoding="utf-8") as metrics_file,
        progress_bar() as bar,
        deferred_interrupt() as interrupted,
    ):
        task = bar.add_task(config.id, total=train.steps, completed=first, note="compiling")
        pending, since, tokens_seen = None, time.perf_counter(), 0

        def report(step, metrics):
            """Metrics are read one step late, so that the device never waits for the host."""
            nonlocal since, tokens_seen
            metrics = {name: float(value) for name, value in metrics.items()}
            if not math.isfinite(metrics["loss"]):
                raise UserError(
                    f"loss is {metrics['loss']} at step {step} of {folder.path}: lower"
                    " --config.train.optimizer.learning_rate; the last checkpoint is from"
                    f" step {ckpt.latest_step(saved) or 0}"
                )
            if step % train.log_every == 0 or step == train.steps:
                now = time.perf_counter()
                rate, since, tokens_seen = tokens_seen / (now - since), now, 0
                row = {"step": step, **metrics, "tokens_per_second": round(rate)}
                metrics_file.write(json.dumps(row) + "\n")
                metrics_file.flush()
                note = f"loss {metrics['loss']:.3f}  acc {metrics['accuracy']:.2f}  {rate / 1e3:.0f}k tok/s"
                bar.update(task, note=note)
            bar.update(task, completed=step)

        for done in range(first, train.steps):
            batch = batch_for_step(config.data, train.batch, done, train.steps, key)
            state, metrics = train_step(state, batch)
            tokens_seen += batch.tokens.size
            if pending is not None:
                report(*pending)
            pending = (done + 1, metrics)
            stopping = interrupted()
            if stopping or (done + 1) % train.checkpoint_every == 0 or done + 1 == train.steps:
                report(*pending)
                pending = None
                ckpt.save(saved, state)
            if stopping:
                bar.console.print(f"stopped at step {done + 1}; the same command continues from there")
                raise KeyboardInterrupt
    return state


def _forget_after(folder: RunFolder, step: int) -> None:
    """Drops metrics of steps after the checkpoint that training continues from: they will be made again."""
    if folder.metrics.exists():
        lines = folder.metrics.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        write_atomically(folder.metrics, "".join(kept))
