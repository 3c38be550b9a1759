"""Scores prompts of shape [n, R, T] with one vmapped, jitted call a batch; only last-position logits are formed."""

import dataclasses
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from phase_jax.data.prompts import PhasePrompts
from phase_jax.data.vocabulary import Vocabulary
from phase_jax.evaluation.decode import continue_from
from phase_jax.evaluation.runner import fingerprint, on_all_devices, over_devices, score_samples
from phase_jax.model import Transformer
from phase_jax.model.cache import empty_cache, extend_unchecked

# What goes through one call on each device: up to 8 logical samples (at lab scale 8 × 24 prompts), fewer where they are
# long, and one by one the prompts of a logical sample that is longer than this many tokens in all.
BATCH, TOKENS = 8, 2**15


def scores_of(logits: jax.Array, answer: jax.Array, vocabulary: Vocabulary | None) -> dict[str, jax.Array]:
    """Scores of last-position logits [..., V] against answers that broadcast to [...]: a dict of arrays [...].

    `correct`: the answer has the highest logit of the whole vocabulary; `correct_of_names`: of the names, where the
    vocabulary says which they are; `gold_probability` and `nll` (nats) of the answer.
    """
    gold = jnp.take_along_axis(logits, answer[..., None], axis=-1)[..., 0]
    nll = jax.nn.logsumexp(logits, axis=-1) - gold
    scores = {"correct": logits.argmax(axis=-1) == answer, "gold_probability": jnp.exp(-nll), "nll": nll}
    if vocabulary is not None:
        names = logits[..., vocabulary.first_name : vocabulary.size]
        scores["correct_of_names"] = names.argmax(axis=-1) + vocabulary.first_name == answer
    return scores


@partial(jax.jit, static_argnames=("model", "vocabulary"))
def score(
    model: Transformer, vocabulary: Vocabulary | None, params: dict, tokens: jax.Array, answer: jax.Array
) -> dict[str, jax.Array]:
    """Scores tokens [B, R, T] against answers [B]: `scores_of` them, [B, R] each. B is a multiple of the devices."""

    def one_replica(params, tokens):
        return model.apply({"params": params}, tokens, last_only=True)

    def on_one_device(params, tokens, answer):
        logits = jax.vmap(one_replica, in_axes=(None, 1), out_axes=1)(params, tokens)
        return scores_of(logits, answer[:, None], vocabulary)

    return over_devices(on_one_device)(params, tokens, answer)


@partial(jax.jit, static_argnames=("model", "count"))
def score_generated(
    model: Transformer, count: int, params: dict, tokens: jax.Array, answer: jax.Array
) -> dict[str, jax.Array]:
    """As `score`, by way of a cache, and `generated` [B, R, count]: so many tokens by greedy decoding."""

    def on_one_device(params, tokens, answer):
        prompts = tokens.reshape(-1, tokens.shape[-1])
        cache = empty_cache(model.cfg, len(prompts), prompts.shape[1] + count)
        logits, cache = extend_unchecked(model, params, cache, prompts)
        generated = continue_from(model, params, cache, logits, count)
        scores = scores_of(logits.reshape(*tokens.shape[:2], -1), answer[:, None], None)
        return {**scores, "generated": generated.reshape(*tokens.shape[:2], count)}

    return over_devices(on_one_device)(params, tokens, answer)


def sweep(
    model: Transformer,
    params: dict,
    prompts: PhasePrompts,
    vocabulary: Vocabulary | None,
    label: str,
    journal: Path | None = None,
    generate: int | None = None,
) -> dict[str, np.ndarray]:
    """Scores all prompts: arrays [n, R] as `score` names them, and `target_position`; see `score_samples`.

    With `generate`, also so many tokens of an answer to each, `generated` [n, R, generate]. Token ids may be a map of a
    file: they are read as they are needed.
    """
    n, residues, length = prompts.tokens.shape
    parts = residues if residues * length > TOKENS else 1
    tokens = prompts.tokens.reshape(n * parts, residues // parts, length)
    settings = {
        "score": "sweep",
        "model": dataclasses.asdict(model.cfg),
        "vocabulary": vocabulary and dataclasses.asdict(vocabulary),
        **({} if generate is None else {"generate": generate}),
    }
    scorer = partial(score, model, vocabulary) if generate is None else partial(score_generated, model, generate)
    scores = score_samples(
        partial(scorer, on_all_devices(params)),
        zip(tokens, np.repeat(prompts.answer, parts), strict=True),
        n * parts,
        batch=min(BATCH, max(1, TOKENS // tokens[0].size)),
        made_of=fingerprint(settings, params),
        label=label,
        journal=journal,
        unit="logical samples" if parts == 1 else "prompts",
    )
    scores = {name: values.reshape(n, residues, *values.shape[2:]) for name, values in scores.items()}
    return {**scores, "target_position": prompts.target_position}
