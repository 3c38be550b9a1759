"""The hand-over from exact to compressed memory: the target moves away from a fixed query, token by token.

A prompt is BOS, the other records, filler in which the target stands alone, the query mark and the target's animal.
There are no demonstrations, so that the target can lie within the exact branch. With the query fixed, a target at
distance d (query position − its key's position) is at phase (T − 1 − d) mod S: S neighbouring distances hold every
phase once.
"""

import dataclasses
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from phase_jax.data.prompts import RECORD_LENGTH, closing_length
from phase_jax.data.vocabulary import Vocabulary
from phase_jax.errors import UserError
from phase_jax.evaluation.runner import fingerprint, on_all_devices, over_devices, score_samples
from phase_jax.geometry import Windows
from phase_jax.model.config import ModelConfig
from phase_jax.statistics import wilson

BATCH = 4  # logical samples a call on each device, each at every distance


@dataclasses.dataclass(frozen=True)
class DistancePrompts:
    """n logical samples at every distance: tokens [n, distances, T], answers [n], distances and target positions."""

    tokens: np.ndarray
    answer: np.ndarray
    distance: np.ndarray
    target_position: np.ndarray


def distance_prompts(vocabulary: Vocabulary, n: int, *, length: int, records: int, seed: int) -> DistancePrompts:
    """Builds the prompts, the target from right before the query mark to right after the other records.

    A function of its arguments alone. Raises UserError for an impossible size.
    """
    if n < 1:
        raise UserError(f"--logical {n}: at least one logical sample is needed")
    nearest = closing_length(0) - 1 + RECORD_LENGTH
    furthest = length - 2 - RECORD_LENGTH * (records - 1)
    if furthest < nearest:
        raise UserError(f"prompt length {length} is too short for {records} records: nowhere is left for the target")
    distance = np.arange(nearest, furthest + 1)
    position = length - 1 - distance

    rng = np.random.default_rng([seed, 2])
    words = np.tile(np.arange(vocabulary.words), (n, 1))
    animals = vocabulary.first_animal + rng.permuted(words, axis=1)[:, :records]
    names = vocabulary.name(rng.permuted(words, axis=1)[:, :records])
    pairs = np.stack([animals, names], axis=-1)

    tokens = np.full((n, len(distance), length), vocabulary.filler, np.int32)
    tokens[..., 0] = vocabulary.bos
    tokens[..., 1 : 1 + RECORD_LENGTH * (records - 1)] = pairs[:, 1:].reshape(n, 1, -1)
    tokens[:, np.arange(len(distance)), position] = animals[:, :1]
    tokens[:, np.arange(len(distance)), position + 1] = names[:, :1]
    tokens[..., -2] = vocabulary.query_mark
    tokens[..., -1] = animals[:, :1]
    return DistancePrompts(tokens, names[:, 0], distance, position)


def target_parts(windows: Windows | None, position: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Which entries [distances, J] and tokens [distances, T] hold a token of the target at these positions."""
    record = position[:, None, None] + np.arange(RECORD_LENGTH)
    tokens = (record == np.arange(length)[:, None]).any(axis=-1)
    starts = windows.starts(length) if windows else np.zeros(0, int)
    width = windows.width if windows else 0
    return ((record >= starts[:, None]) & (record < starts[:, None] + width)).any(axis=-1), tokens


PARTS = ("entries", "entries_of_target", "exact", "exact_of_target")


@partial(jax.jit, static_argnames="model")
def score(model: nn.Module, params: dict, of_target: tuple, tokens: jax.Array, answer: jax.Array) -> dict:
    """Scores tokens [B, distances, T]: `correct`, `nll`, `gold_probability` [B, distances], and where the attention of
    the last position goes, `mass` [B, part, distances, L, N] with the parts of PARTS. B is a multiple of the devices.
    """

    def on_one_device(shared, tokens, answer):
        params, of_target = shared
        batch, distances, length = tokens.shape
        logits, seen = model.apply(
            {"params": params}, tokens.reshape(-1, length), last_only=True, mutable="intermediates"
        )
        (weights,) = seen["intermediates"]["layers"]["attention"]["last_weights"]
        logits = logits.reshape(batch, distances, -1)
        nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), answer[:, None, None], axis=-1)[..., 0]
        mass = []
        for part, target in zip(weights, of_target, strict=True):
            layers, _, heads, count = part.shape
            by_prompt = jnp.moveaxis(part, 0, 1).reshape(batch, distances, layers, heads, count)
            mass += [by_prompt.sum(axis=-1), (by_prompt * target[:, None, None]).sum(axis=-1)]
        correct = logits.argmax(axis=-1) == answer[:, None]
        return {"correct": correct, "nll": nll, "gold_probability": jnp.exp(-nll), "mass": jnp.stack(mass, axis=1)}

    return over_devices(on_one_device)((params, of_target), tokens, answer)


def measure(model: nn.Module, params: dict, prompts: DistancePrompts, label: str, journal: Path | None = None) -> dict:
    """Scores all prompts: arrays `correct`, `nll`, `gold_probability` [n, distances], `mass` [part, distances, L, N]
    (the mean over samples), `distance` and `target_position`; see `score_samples`."""
    of_target = target_parts(model.cfg.windows, prompts.target_position, prompts.tokens.shape[-1])
    settings = {
        "score": "distance",
        "model": dataclasses.asdict(model.cfg),
        "target_position": prompts.target_position.tolist(),
    }
    scores = score_samples(
        partial(score, model, *on_all_devices((params, of_target))),
        zip(prompts.tokens, prompts.answer, strict=True),
        len(prompts.answer),
        batch=BATCH,
        made_of=fingerprint(settings, params),
        label=label,
        journal=journal,
    )
    mass = scores.pop("mass").mean(axis=0, dtype=np.float64)
    return {**scores, "mass": mass, "distance": prompts.distance, "target_position": prompts.target_position}


def distance_report(scores: dict, config: ModelConfig) -> dict:
    """What `measure` found, as JSON: accuracy (Wilson 95 %) and attention mass by distance, and by `bands` of them.

    A band is S neighbouring distances (8 in full attention), and so holds every phase once; a phase that the last band
    ends before is null. `mass` is {part: [L][distances]}, the mean over heads; in a band {part: [L]}.
    """
    correct, distance = scores["correct"], scores["distance"]
    accuracy, (low, high) = correct.mean(axis=0), wilson(correct.sum(axis=0), len(correct))
    mass = dict(zip(PARTS, scores["mass"].mean(axis=-1), strict=True))
    size = config.stride or 8
    phase = scores["target_position"] % size

    def band(first: int) -> dict:
        own = slice(first, first + size)
        by_phase = dict(zip(phase[own].tolist(), accuracy[own].tolist(), strict=True))
        return {
            "distances": [int(distance[own][0]), int(distance[own][-1])],
            "accuracy": float(accuracy[own].mean()),
            "accuracy_by_phase": [by_phase.get(p) for p in range(size)] if config.windows else None,
            "mass": {part: values[own].mean(axis=0).tolist() for part, values in mass.items()},
        }

    return {
        "n_logical": len(correct),
        "W": config.window,
        "S": config.stride,
        "kv_heads": config.kv_heads,
        "exact": config.exact if config.windows else None,
        "exact_reach": config.exact_branch.reach,
        "query_position": int(distance[0] + scores["target_position"][0]),
        "distance": distance.tolist(),
        "phase": phase.tolist() if config.windows else None,
        "accuracy": accuracy.tolist(),
        "accuracy_low": low.tolist(),
        "accuracy_high": high.tolist(),
        "mass": {part: values.T.tolist() for part, values in mass.items()},
        "bands": [band(first) for first in range(0, len(distance), size)],
    }
