"""Trains a run from its last checkpoint to its end."""

import json
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from phase_jax.data.tokens import TokenBatch
from phase_jax.errors import UserError
from phase_jax.interrupt import deferred_interrupt
from phase_jax.model import Transformer
from phase_jax.progress import progress_bar
from phase_jax.run import RunConfig, RunFolder, read_json, write_atomically, write_json
from phase_jax.training import checkpoints as ckpt
from phase_jax.training.feed import INIT, Feed, open_feed, purpose_key
from phase_jax.training.optimizer import make_optimizer
from phase_jax.training.processes import any_process, wait_for_all
from phase_jax.training.sharding import make_mesh, on_mesh, place
from phase_jax.training.step import (
    TrainState,
    init_state,
    make_train_step,
    recall_loss,
    state_shapes,
    token_loss,
)

# A loss is held against the median of so many before it, once there are a quarter of them.
_RECENT = 64


def train(config: RunConfig, folder: RunFolder, mesh: Mesh | None = None) -> dict:
    """Trains, or continues, or finds it done; returns training.json's content.

    On `mesh`, by default one device's. Where it spans several processes, each calls this with the same arguments and a
    folder that they share; the first one writes what is not a checkpoint.

    A run that was stopped at any point goes on from its last good checkpoint with the same losses, bit for bit: the
    state and where the data stand are in it. On Ctrl-C the state is saved before KeyboardInterrupt is raised. Raises
    UserError where the folder holds another run, no checkpoint of several can be used, or the loss leaps or is no
    longer a number.
    """
    mesh = make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh
    done = folder.training.exists()
    feed = None if done else open_feed(config, mesh)  # which refuses what does not fit before anything is written
    if jax.process_index() == 0:
        folder.claim(config)
    wait_for_all("claimed")
    folder.claim(config)  # which the others find done
    if done:
        return read_json(folder.training)
    model = Transformer(config.model)
    optimizer = make_optimizer(config.train.optimizer, config.train.steps)
    validate = _validation(config, model, feed, mesh)
    like = state_shapes(model, optimizer, mesh)

    with ckpt.open_checkpoints(folder.checkpoints, config.train.keep_checkpoints) as saved:
        found = ckpt.restore(saved, like, config, set_aside=True)
        start, recent = 0, deque(maxlen=_RECENT)
        if found is None:
            state = _fresh(config, model, optimizer, like)
        else:
            state, start = found.state, int(found.state.step)
            data = found.data or {"feed": {"next_index": start}, "recent_losses": []}
            feed.set_state(data["feed"])
            recent.extend(data["recent_losses"])
        _forget_after(folder, start)
        began = time.perf_counter()
        train = config.train
        train_step = make_train_step(model, optimizer, train.first_layer_weight, train.z_weight, train.loss_chunk, mesh)
        state = _run_steps(config, folder, mesh, train_step, state, feed, recent, validate, saved)
    result = {
        "steps": config.train.steps,
        "validation_loss": validate(state.params),
        "seconds": round(time.perf_counter() - began, 2),
        "resumed_from": start or None,
    }
    if jax.process_index() == 0:
        write_json(folder.training, result)
    return result


def _fresh(config: RunConfig, model: Transformer, optimizer: optax.GradientTransformation, like: TrainState):
    """The state that a run begins with, lying as `like` does."""

    def init(key_data: jax.Array) -> TrainState:
        return init_state(model, optimizer, jax.random.wrap_key_data(key_data))

    # Every process gives the same numbers; a key is an array of the one device that made it.
    key_data = np.asarray(jax.random.key_data(purpose_key(config.seed, INIT)))
    return jax.jit(init, out_shardings=jax.tree.map(lambda x: x.sharding, like))(key_data)


def load_params(config: RunConfig, folder: RunFolder, step: int | None = None) -> dict:
    """Parameters of the checkpoint of a step, or of the newest good one. Raises UserError where there is none."""
    model = Transformer(config.model)
    optimizer = make_optimizer(config.train.optimizer, config.train.steps)
    like = jax.eval_shape(lambda key: init_state(model, optimizer, key), jax.random.key(0))
    with ckpt.open_checkpoints(folder.checkpoints) as saved:
        found = ckpt.restore(saved, like, config, step)
    if found is None:
        raise UserError(f"{folder.path} holds no checkpoint yet: continue it with phase-jax train")
    return found.state.params


def saved_steps(folder: RunFolder) -> list[int]:
    """Steps of the checkpoints that are kept, oldest first."""
    with ckpt.open_checkpoints(folder.checkpoints) as saved:
        return [checkpoint.step for checkpoint in saved.checkpoints]


def _validation(config: RunConfig, model: Transformer, feed: Feed, mesh: Mesh) -> Callable[[dict], float]:
    """Parameters -> mean loss on the held-out batches."""

    @jax.jit
    def loss(params, batch):
        with on_mesh(mesh):
            if isinstance(batch, TokenBatch):
                return token_loss(model, params, batch, chunk=config.train.loss_chunk).cross_entropy
            return recall_loss(model, params, batch)[0]

    return lambda params: float(np.mean([loss(params, place(batch, mesh)) for batch in feed.held_out()]))


def _run_steps(
    config: RunConfig,
    folder: RunFolder,
    mesh: Mesh,
    train_step: Callable,
    state: TrainState,
    feed: Feed,
    recent: deque,
    validate: Callable[[dict], float],
    saved,
) -> TrainState:
    """Steps from the state's own to the last, with progress, metrics and checkpoints."""
    train = config.train
    first = int(state.step)
    with (
        open(folder.metrics if jax.process_index() == 0 else os.devnull, "a", encoding="utf-8") as metrics_file,
        progress_bar() as bar,
        deferred_interrupt() as interrupted,
    ):
        task = bar.add_task(config.id, total=train.steps, completed=first, note="compiling")
        pending, since, tokens_seen = None, time.perf_counter(), 0

        def report(step, metrics, **more):
            """Metrics are read one step late, so that the device never waits for the host."""
            nonlocal since, tokens_seen
            metrics = {name: float(value) for name, value in metrics.items()}
            if wrong := _unhealthy(metrics, recent, train.loss_spike):
                last = ckpt.latest_step(saved)
                kept = f"the last good checkpoint is {folder.checkpoints / str(last)}" if last else "none is saved yet"
                raise UserError(
                    f"{wrong} at step {step} of {folder.path}, on {feed.name(step - 1)}; {kept}: try a lower"
                    " --config.train.optimizer.learning_rate in another --workdir"
                )
            recent.append(metrics["loss"])
            if more or step % train.log_every == 0 or step == train.steps:
                now = time.perf_counter()
                rate, since, tokens_seen = tokens_seen / (now - since), now, 0
                row = {"step": step, **metrics, **more, "tokens_per_second": round(rate)}
                metrics_file.write(json.dumps(row) + "\n")
                metrics_file.flush()
                note = f"loss {metrics['loss']:.3f}  acc {metrics['accuracy']:.2f}  {rate / 1e3:.0f}k tok/s"
                bar.update(task, note=note)
            bar.update(task, completed=step)

        for done in range(first + 1, train.steps + 1):
            batch = place(next(feed), mesh)
            state, metrics = train_step(state, batch)
            tokens_seen += batch.tokens.size
            if pending is not None:
                report(*pending)
            pending = (done, metrics)
            stopping = any_process(interrupted(), asked=done % train.log_every == 0)
            saving = stopping or done % train.checkpoint_every == 0 or done == train.steps
            validating = train.validate_every is not None and done % train.validate_every == 0
            if saving or validating:
                report(*pending, **({"validation_loss": validate(state.params)} if validating else {}))
                pending = None
            if saving:
                where = {"feed": feed.get_state(), "recent_losses": list(recent)}
                ckpt.save(saved, state, config, where)
            if stopping:
                bar.console.print(f"stopped at step {done}; the same command continues from there")
                raise KeyboardInterrupt
    return state


def _unhealthy(metrics: dict, recent: deque, spike: float) -> str | None:
    """What is wrong with a step's metrics, or None: a number that is none, or a loss far above those before it."""
    for name, value in metrics.items():
        if not math.isfinite(value):
            return f"{name} is {value}"
    if len(recent) >= _RECENT // 4 and metrics["loss"] > (usual := statistics.median(recent)) + spike:
        return f"loss leapt from {usual:.3f} (median of the {len(recent)} before) to {metrics['loss']:.3f}"
    return None


def _forget_after(folder: RunFolder, step: int) -> None:
    """Drops metrics of steps after the checkpoint that training continues from: they will be made again."""
    if jax.process_index() == 0 and folder.metrics.exists():
        lines = folder.metrics.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        write_atomically(folder.metrics, "".join(kept))
