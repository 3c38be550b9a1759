"""Counterfactual gates: how much of the gap each cause carries in one trained model.

The same prompts are answered by the model as it is and by models in which one cause of a gap is taken away, or several
(see CONDITIONS):

* `boundary`: where no entry holds the target's key and its value, the last query sees the exact value token as well;
* `input`: what a gate decides by the tokens it sees. Taken away, all windows have the mean weights (gates are frozen);
* `static`: what a gate does to all windows alike. Taken away, weights are divided by their mean and normalised;
  without both, gates are uniform;
* `payload`: that offsets have payload maps of their own. Taken away, all have the mean map.

As a check, `shuffled` gives every head the weights of another head (of any layer) on the same windows.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from phase_jax.data.prompts import PhasePrompts
from phase_jax.data.vocabulary import Vocabulary
from phase_jax.evaluation.runner import fingerprint, on_all_devices, over_devices, score_samples
from phase_jax.evaluation.sweep import scores_of
from phase_jax.geometry import Windows
from phase_jax.interventions.gates import BRANCHES, gate_totals
from phase_jax.model import Intervention, ModelConfig, Transformer
from phase_jax.statistics import (
    compare,
    gap_change_interval,
    gap_interval,
    mean_interval,
    summarise,
    to_json,
    worst_interval,
)

BATCH = 4  # logical samples a call on each device; every one is read under all conditions

GATES = ("own", "frozen", "reweighted", "uniform", "shuffled")


class Condition(NamedTuple):
    """What a counterfactual model has: which of GATES, and whether without the boundary and with one payload map."""

    gates: str = "own"
    boundary: bool = False
    payload: bool = False


CONDITIONS = {
    "clean": Condition(),
    "boundary": Condition(boundary=True),
    "input": Condition("frozen"),
    "static": Condition("reweighted"),
    "uniform": Condition("uniform"),
    "payload": Condition(payload=True),
    "shuffled": Condition("shuffled"),
    "boundary+input": Condition("frozen", boundary=True),
    "boundary+input+static": Condition("uniform", boundary=True),
    "boundary+input+static+payload": Condition("uniform", boundary=True, payload=True),
}
ALONE = ("boundary", "input", "static", "uniform", "payload", "shuffled")
STEPS = ("clean", "boundary", "boundary+input", "boundary+input+static", "boundary+input+static+payload")
CAUSES = ("boundary", "input", "static", "payload")  # what each step takes away


def mean_gates(model: Transformer, params: dict, prompts: PhasePrompts) -> dict[str, np.ndarray]:
    """Mean weights [L, W, K, g] of each branch's gates over the windows that hold a record."""
    count, totals = gate_totals(model, params, prompts)
    return {branch: (mass / count).astype(np.float32) for branch, (mass, _) in totals.items()}


def head_cycle(layers: int, kv_heads: int, seed: int = 0) -> np.ndarray:
    """For each of the L·K heads another one (where there is another), [L·K]: all in one random cycle."""
    order = np.random.default_rng([seed, 4]).permutation(layers * kv_heads)
    cycle = np.empty_like(order)
    cycle[order] = np.roll(order, 1)
    return cycle


def counterfactual_gates(
    gates: jax.Array, mean: jax.Array, windows: Windows, length: int, cycle: np.ndarray
) -> jax.Array:
    """The weights of every kind in GATES, [kind, L, B, J, W, K, g], from the model's own [L, B, J, W, K, g] and their
    mean [L, W, K, g]. They sum to 1 over the tokens that exist."""
    layers, *_, heads, channels = gates.shape
    present = windows.starts(length)[:, None] + np.arange(windows.width) >= 0
    present = present[:, :, None, None].astype(np.float32)

    def normalised(weights):
        return jnp.broadcast_to(weights / weights.sum(axis=3, keepdims=True), gates.shape)

    mean = mean[:, None, None]
    by_head = jnp.moveaxis(gates, 4, 1).reshape(layers * heads, *gates.shape[1:4], channels)
    shuffled = jnp.moveaxis(by_head[cycle].reshape(layers, heads, *by_head.shape[1:]), 1, 4)
    return jnp.stack(
        [
            gates,
            normalised(mean * present),
            normalised(gates / jnp.maximum(mean, 1e-6)),
            normalised(present[None, None]),
            shuffled,
        ]
    )


@partial(jax.jit, static_argnames=("model", "vocabulary"))
def score(
    model: Transformer,
    vocabulary: Vocabulary,
    shared: tuple,
    tokens: jax.Array,
    answer: jax.Array,
    target: jax.Array,
) -> dict:
    """Scores tokens [B, R, T] with the target's key at [B, R] against answers [B] under all CONDITIONS, [B, C, R] each.

    `shared` are the parameters, the mean gates and the cycle of heads.
    """
    windows = model.cfg.windows

    def on_one_device(shared, tokens, answer, target):
        params, means, cycle = shared
        samples, residues, length = tokens.shape
        tokens, target = tokens.reshape(-1, length), target.reshape(-1)
        _, left = model.apply({"params": params}, tokens, method="hidden_states", mutable="intermediates")
        attention = left["intermediates"]["layers"]["attention"]
        kinds = {
            branch: counterfactual_gates(attention[f"compress_{branch}"]["gates"][0], mean, windows, length, cycle)
            for branch, mean in means.items()
        }
        exact = (jnp.arange(length) == target[:, None] + 1) & windows.parted(target)[:, None]
        exact = jnp.broadcast_to(exact, (model.cfg.layers, *exact.shape))

        def under(condition):
            kind, boundary, payload = condition
            key, value = (kinds[branch][kind] if branch in kinds else None for branch in BRANCHES)
            change = Intervention(None, key, value, exact & boundary)
            changed = with_mean_maps(params, payload)
            return model.apply({"params": changed}, tokens, last_only=True, change=change)

        conditions = (
            jnp.array([GATES.index(condition.gates) for condition in CONDITIONS.values()]),
            jnp.array([condition.boundary for condition in CONDITIONS.values()]),
            jnp.array([condition.payload for condition in CONDITIONS.values()]),
        )
        logits = jax.lax.map(under, conditions)
        by_sample = jnp.moveaxis(logits.reshape(len(logits), samples, residues, -1), 0, 1)
        return scores_of(by_sample, answer[:, None, None], vocabulary)

    return over_devices(on_one_device)(shared, tokens, answer, target)


def with_mean_maps(params: dict, wanted: bool | jax.Array) -> dict:
    """Parameters in which, if `wanted`, every payload map [L, maps, D, K, H] is the mean over maps."""
    layers = params["layers"]
    attention = dict(layers["attention"])
    for branch in (f"compress_{name}" for name in BRANCHES):
        if branch in attention:
            maps = attention[branch]["payload"]
            mean = jnp.broadcast_to(maps.mean(axis=1, keepdims=True), maps.shape)
            attention[branch] = {**attention[branch], "payload": jnp.where(wanted, mean, maps)}
    return {**params, "layers": {**layers, "attention": attention}}


def measure(
    model: Transformer,
    params: dict,
    prompts: PhasePrompts,
    vocabulary: Vocabulary,
    means: dict[str, np.ndarray],
    label: str,
    journal: Path | None = None,
) -> dict:
    """Scores of all prompts under all CONDITIONS, arrays [n, C, R]; `means` are `mean_gates` of other prompts."""
    shared = on_all_devices((params, means, head_cycle(model.cfg.layers, model.cfg.kv_heads)))
    settings = {"score": "counterfactual", "model": dataclasses.asdict(model.cfg), "conditions": list(CONDITIONS)}
    return score_samples(
        partial(score, model, vocabulary, shared),
        zip(prompts.tokens, prompts.answer, prompts.target_position.astype(np.int32), strict=True),
        len(prompts.answer),
        batch=BATCH,
        made_of=fingerprint(settings, shared),
        label=label,
        journal=journal,
    )


def counterfactual_report(scores: dict, config: ModelConfig) -> dict:
    """What `measure` found, as JSON: the numbers of every condition, and the table of causes.

    `alone`: the gap that each cause (and each check) explains by itself, the clean model's minus that without it;
    `in_order`: what taking each away removes after those before it in CAUSES; `remains`: the gap that is left.
    Intervals of differences are those of `gap_change_interval` and `compare`. The boundary is None where windows
    overlap, since there is none, and so is `shuffled` where the model has one head.
    """
    correct = dict(zip(CONDITIONS, np.moveaxis(scores["correct"], 1, 0), strict=True))
    nll = dict(zip(CONDITIONS, np.moveaxis(scores["nll"], 1, 0), strict=True))

    def explained(before: str, after: str) -> dict:
        difference = compare(correct[before], correct[after])
        return {
            "gap": difference.gap,
            "gap_interval": gap_change_interval(correct[before], correct[after]),
            "mean": difference.mean,
            "mean_interval": difference.mean_interval,
        }

    alone = {name: explained("clean", name) for name in ALONE}
    in_order = {
        cause: explained(before, after) for cause, before, after in zip(CAUSES, STEPS[:-1], STEPS[1:], strict=True)
    }
    if config.window > config.stride:
        alone["boundary"] = in_order["boundary"] = None
    if config.layers * config.kv_heads == 1:
        alone["shuffled"] = None
    conditions = {}
    for name, answers in correct.items():
        accuracy = answers.mean(axis=0)
        conditions[name] = {
            "accuracy": accuracy,
            **summarise(accuracy),
            "mean_interval": mean_interval(answers.mean(axis=1)),
            "worst_interval": worst_interval(answers),
            "gap_interval": gap_interval(answers),
            "nll": nll[name].mean(axis=0),
        }
    left = conditions[STEPS[-1]]
    remains = {name: left[name] for name in ("gap", "gap_interval", "mean", "mean_interval")}
    return to_json({"conditions": conditions, "alone": alone, "in_order": in_order, "remains": remains})
