"""Trains a run from its last checkpoint to its end."""

import dataclasses
import json
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from phase_jax.data.tokens import TokenBatch
from phase_jax.errors import UserError
from phase_jax.interrupt import deferred_interrupt
from phase_jax.model import ModelConfig, Transformer, qwen3
from phase_jax.model.transfer import compressed_from_full
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
    return train_together([config], [folder], mesh)[0]


def train_together(configs: Sequence[RunConfig], folders: Sequence[RunFolder], mesh: Mesh | None = None) -> list[dict]:
    """`train` for runs that differ in their seeds alone: one vmapped call makes a step of all.

    Each keeps its own folder, data, optimizer state and clipping, and could be continued alone. Runs that stand behind
    the others catch up first. Raises UserError also where the runs differ in more than their seeds.
    """
    mesh = make_mesh(devices=jax.devices()[:1]) if mesh is None else mesh
    first = configs[0]
    for config in configs[1:]:
        if dataclasses.replace(config, seed=first.seed) != first:
            raise UserError(f"{config.id}: runs that are trained together may differ in their seeds alone")
    # Feeds refuse what does not fit before anything is written.
    feeds = [None if f.training.exists() else open_feed(c, mesh) for c, f in zip(configs, folders, strict=True)]
    given = None
    begun = [any(path.name.isdigit() for path in folder.checkpoints.glob("*")) for folder in folders]
    if first.train.init_from is not None and not all(begun):
        given = given_params(Path(first.train.init_from), first.model)
    for config, folder in zip(configs, folders, strict=True):
        if jax.process_index() == 0:
            folder.claim(config)
        wait_for_all("claimed")
        folder.claim(config)  # which the others find done
    if not any(feeds):
        return [read_json(folder.training) for folder in folders]
    train, model = first.train, Transformer(first.model)
    optimizer = make_optimizer(train.optimizer, train.steps)
    train_step = make_train_step(model, optimizer, train.first_layer_weight, train.z_weight, train.loss_chunk, mesh)
    validate = _validation(first, model, mesh)
    began = time.perf_counter()
    with ExitStack() as stack:
        lanes = []
        for config, folder, feed in zip(configs, folders, feeds, strict=True):
            if feed is not None:
                saved = stack.enter_context(ckpt.open_checkpoints(folder.checkpoints, train.keep_checkpoints))
                lanes.append(_Lane(config, folder, feed, saved, model, optimizer, mesh, given))
        while behind := [lane for lane in lanes if lane.step < train.steps]:
            step = min(lane.step for lane in behind)
            until = min((lane.step for lane in behind if lane.step > step), default=train.steps)
            _run_steps([lane for lane in behind if lane.step == step], mesh, train_step, validate, until)
    for lane in lanes:
        result = {
            "steps": train.steps,
            "validation_loss": validate(lane.state.params, lane.feed),
            "seconds": round(time.perf_counter() - began, 2),
            "resumed_from": lane.resumed_from,
        }
        if jax.process_index() == 0:
            write_json(lane.folder.training, result)
    wait_for_all("trained")
    return [read_json(folder.training) for folder in folders]


class _Lane:
    """One run in training: its state, what it reads, the losses that its next one is held against, its records."""

    def __init__(
        self, config: RunConfig, folder: RunFolder, feed: Feed, saved, model, optimizer, mesh: Mesh, given: dict | None
    ):
        """At its last good checkpoint, or at its beginning, with the parameters `given` if there are any."""
        self.config, self.folder, self.feed, self.saved = config, folder, feed, saved
        self.recent = deque(maxlen=_RECENT)
        self.step, self.resumed_from = 0, None
        like = state_shapes(model, optimizer, mesh)
        found = ckpt.restore(saved, like, config, set_aside=True)
        if found is None:
            self.state = _fresh(config, model, optimizer, like)
            if given is not None:
                params = jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), given, like.params)
                self.state = self.state._replace(params=params)
        else:
            self.state = found.state
            self.step = self.resumed_from = int(found.state.step)
            data = found.data or {"feed": {"next_index": self.step}, "recent_losses": []}
            self.feed.set_state(data["feed"])
            self.recent.extend(data["recent_losses"])
        _forget_after(folder, self.step)

    def check(self, step: int, metrics: dict[str, float]) -> None:
        """Raises UserError where a step's metrics are none, or its loss leapt."""
        if wrong := _unhealthy(metrics, self.recent, self.config.train.loss_spike):
            last = ckpt.latest_step(self.saved)
            kept = f"the last good checkpoint is {self.folder.checkpoints / str(last)}" if last else "none is saved yet"
            raise UserError(
                f"{wrong} at step {step} of {self.folder.path}, on {self.feed.name(step - 1)}; {kept}: try a lower"
                " --config.train.optimizer.learning_rate in another --workdir"
            )
        self.recent.append(metrics["loss"])

    def record(self, row: dict) -> None:
        """Appends a line to metrics.jsonl."""
        if jax.process_index() == 0:
            with open(self.folder.metrics, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def save(self, state: TrainState) -> None:
        where = {"feed": self.feed.get_state(), "recent_losses": list(self.recent)}
        ckpt.save(self.saved, state, self.config, where)


def _fresh(config: RunConfig, model: Transformer, optimizer: optax.GradientTransformation, like: TrainState):
    """The state that a run begins with, lying as `like` does."""

    def init(key_data: jax.Array) -> TrainState:
        return init_state(model, optimizer, jax.random.wrap_key_data(key_data))

    # Every process gives the same numbers; a key is an array of the one device that made it.
    key_data = np.asarray(jax.random.key_data(purpose_key(config.seed, INIT)))
    return jax.jit(init, out_shardings=jax.tree.map(lambda x: x.sharding, like))(key_data)


def given_params(folder: Path, wanted: ModelConfig) -> dict:
    """Parameters that a run of the model `wanted` begins with, made of a full-attention run's or of Qwen3's (numpy).

    Raises UserError where the folder is neither, or its model does not fit.
    """
    run = RunFolder(folder)
    if not run.config.is_file():
        raise UserError(f"--init-from {folder}: it holds no config.json, so it is no run's folder and no Qwen3's")
    if qwen3.is_checkpoint(folder):
        source, params = qwen3.read(folder)
    else:
        config = run.read_config()
        source, params = config.model, jax.device_get(load_params(config, run))
    return compressed_from_full(params, source, wanted)


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


def _validation(config: RunConfig, model: Transformer, mesh: Mesh) -> Callable[[dict, Feed], float]:
    """(parameters, feed) -> mean loss on the feed's held-out batches."""

    @jax.jit
    def loss(params, batch):
        with on_mesh(mesh):
            if isinstance(batch, TokenBatch):
                return token_loss(model, params, batch, chunk=config.train.loss_chunk).cross_entropy
            return recall_loss(model, params, batch)[0]

    return lambda params, feed: float(np.mean([loss(params, place(batch, mesh)) for batch in feed.held_out()]))


def _run_steps(lanes: Sequence[_Lane], mesh: Mesh, train_step: Callable, validate: Callable, until: int) -> None:
    """Steps of all lanes from where they stand to `until`, with progress, metrics and checkpoints."""
    config, first = lanes[0].config, lanes[0].step
    train, many = config.train, f" × {len(lanes)} seeds" if len(lanes) > 1 else ""
    if many:
        train_step = jax.jit(jax.vmap(train_step), donate_argnums=0)
    state = _stacked([lane.state for lane in lanes])
    for lane in lanes:
        lane.state = None  # its memory is given to the steps
    with progress_bar() as bar, deferred_interrupt() as interrupted:
        task = bar.add_task(f"{config.id}{many}", total=train.steps, completed=first, note="compiling")
        pending, since, tokens_seen = None, time.perf_counter(), 0

        def report(step, metrics, validated=None):
            """Metrics are read one step late, so that the device never waits for the host."""
            nonlocal since, tokens_seen
            own = [{name: float(v) for name, v in _part(metrics, i, lanes).items()} for i in range(len(lanes))]
            for lane, values in zip(lanes, own, strict=True):
                lane.check(step, values)
            if validated or step % train.log_every == 0 or step == train.steps:
                now = time.perf_counter()
                rate, since, tokens_seen = tokens_seen / (now - since), now, 0
                for i, (lane, values) in enumerate(zip(lanes, own, strict=True)):
                    more = {"validation_loss": validated[i]} if validated else {}
                    lane.record({"step": step, **values, **more, "tokens_per_second": round(rate)})
                loss, accuracy = (np.mean([values[name] for values in own]) for name in ("loss", "accuracy"))
                bar.update(task, note=f"loss {loss:.3f}  acc {accuracy:.2f}  {rate / 1e3:.0f}k tok/s")
            bar.update(task, completed=step)

        for done in range(first + 1, until + 1):
            batch = _stacked([place(next(lane.feed), mesh) for lane in lanes])
            state, metrics = train_step(state, batch)
            tokens_seen += batch.tokens.size
            if pending is not None:
                report(*pending)
            pending = (done, metrics)
            stopping = any_process(interrupted(), asked=done % train.log_every == 0)
            saving = stopping or done % train.checkpoint_every == 0 or done == train.steps
            validating = train.validate_every is not None and done % train.validate_every == 0
            if saving or validating or done == until:
                parts = [_part(state, i, lanes) for i in range(len(lanes))]
                both = zip(parts, lanes, strict=True)
                report(*pending, [validate(part.params, lane.feed) for part, lane in both] if validating else None)
                pending = None
            if saving:
                for lane, part in zip(lanes, parts, strict=True):
                    lane.save(part)
            if stopping:
                bar.console.print(f"stopped at step {done}; the same command continues from there")
                raise KeyboardInterrupt
    for lane, part in zip(lanes, parts, strict=True):
        lane.state, lane.step = part, until


def _stacked(trees: Sequence) -> Any:
    """Several trees as one with a new leading axis; a single one as it is."""
    return trees[0] if len(trees) == 1 else jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _part(tree: Any, i: int, of: Sequence) -> Any:
    """What `_stacked` made of the i-th of `of`."""
    return tree if len(of) == 1 else jax.tree.map(lambda leaf: leaf[i], tree)


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
