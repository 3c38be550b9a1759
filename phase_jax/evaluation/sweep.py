"""Scores prompts of shape [n, R, T] with one vmapped, jitted call a batch; only last-position logits are formed."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from phase_jax.data.prompts import PhasePrompts
from phase_jax.data.vocabulary import Vocabulary
from phase_jax.model import Transformer
from phase_jax.progress import progress_bar

BATCH = 8  # logical samples a call: 8 × 24 prompts


@partial(jax.jit, static_argnames=("model", "vocabulary"))
def score(model: Transformer, vocabulary: Vocabulary, params: dict, tokens: jax.Array, answer: jax.Array) -> dict:
    """Scores tokens [B, R, T] against answers [B]: a dict of [B, R] arrays.

    `correct`: the answer has the highest logit of the whole vocabulary; `correct_of_names`: of the names;
    `gold_probability` and `nll` (nats) of the answer.
    """

    def one_replica(tokens):
        return model.apply({"params": params}, tokens, last_only=True)

    logits = jax.vmap(one_replica, in_axes=1, out_axes=1)(tokens)
    answer = answer[:, None]
    gold = jnp.take_along_axis(logits, answer[..., None], axis=-1)[..., 0]
    nll = jax.nn.logsumexp(logits, axis=-1) - gold
    names = logits[..., vocabulary.first_name : vocabulary.first_name + vocabulary.words]
    return {
        "correct": logits.argmax(axis=-1) == answer,
        "correct_of_names": names.argmax(axis=-1) + vocabulary.first_name == answer,
        "gold_probability": jnp.exp(-nll),
        "nll": nll,
    }


def sweep(model: Transformer, params: dict, prompts: PhasePrompts, vocabulary: Vocabulary, label: str) -> dict:
    """Scores all prompts: arrays [n, R] as `score` names them, and `target_position`. Shows progress under `label`."""
    n = len(prompts.answer)
    batch = min(BATCH, n)
    parts = []
    with progress_bar() as bar:
        task = bar.add_task(label, total=n, note="logical samples")
        for start in range(0, n, batch):
            # The last batch is filled up with samples that were scored already: one shape, one compilation.
            rows = np.minimum(np.arange(start, start + batch), n - 1)
            scores = jax.device_get(score(model, vocabulary, params, prompts.tokens[rows], prompts.answer[rows]))
            parts.append({name: values[: n - start] for name, values in scores.items()})
            bar.update(task, completed=min(start + batch, n))
    scores = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return {**scores, "target_position": prompts.target_position}
