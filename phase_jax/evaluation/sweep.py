"""Scores prompts of shape [n, R, T] with one vmapped, jitted call a batch; only last-position logits are formed."""

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp

from phase_jax.data.prompts import PhasePrompts
from phase_jax.data.vocabulary import Vocabulary
from phase_jax.evaluation.runner import fingerprint, on_all_devices, over_devices, score_samples
from phase_jax.model import Transformer

BATCH = 8  # logical samples a call on each device: 8 × 24 prompts


def scores_of(logits: jax.Array, answer: jax.Array, vocabulary: Vocabulary) -> dict:
    """Scores of last-position logits [..., V] against answers that broadcast to [...]: a dict of arrays [...].

    `correct`: the answer has the highest logit of the whole vocabulary; `correct_of_names`: of the names;
    `gold_probability` and `nll` (nats) of the answer.
    """
    gold = jnp.take_along_axis(logits, answer[..., None], axis=-1)[..., 0]
    nll = jax.nn.logsumexp(logits, axis=-1) - gold
    names = logits[..., vocabulary.first_name : vocabulary.first_name + vocabulary.words]
    return {
        "correct": logits.argmax(axis=-1) == answer,
        "correct_of_names": names.argmax(axis=-1) + vocabulary.first_name == answer,
        "gold_probability": jnp.exp(-nll),
        "nll": nll,
    }


@partial(jax.jit, static_argnames=("model", "vocabulary"))
def score(model: Transformer, vocabulary: Vocabulary, params: dict, tokens: jax.Array, answer: jax.Array) -> dict:
    """Scores tokens [B, R, T] against answers [B]: `scores_of` them, [B, R] each. B is a multiple of the devices."""

    def one_replica(params, tokens):
        return model.apply({"params": params}, tokens, last_only=True)

    def on_one_device(params, tokens, answer):
        logits = jax.vmap(one_replica, in_axes=(None, 1), out_axes=1)(params, tokens)
        return scores_of(logits, answer[:, None], vocabulary)

    return over_devices(on_one_device)(params, tokens, answer)


def sweep(
    model: Transformer,
    params: dict,
    prompts: PhasePrompts,
    vocabulary: Vocabulary,
    label: str,
    journal: Path | None = None,
) -> dict:
    """Scores all prompts: arrays [n, R] as `score` names them, and `target_position`; see `score_samples`."""
    settings = {"score": "sweep", "model": dataclasses.asdict(model.cfg), "vocabulary": dataclasses.asdict(vocabulary)}
    scores = score_samples(
        partial(score, model, vocabulary, on_all_devices(params)),
        zip(prompts.tokens, prompts.answer, strict=True),
        len(prompts.answer),
        batch=BATCH,
        made_of=fingerprint(settings, params),
        label=label,
        journal=journal,
    )
    return {**scores, "target_position": prompts.target_position}
