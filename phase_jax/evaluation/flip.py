"""The completion flip: the odds of a right and a wrong continuation against the number of filler tokens (SPEC §5)."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from phase_jax.data.completion import CompletionPrompts
from phase_jax.evaluation.runner import fingerprint, on_all_devices, over_devices, score_samples
from phase_jax.statistics import sweep_period

BATCH = 16  # prompts a call on each device, each with two continuations

Scorer = Callable[[CompletionPrompts], np.ndarray]


@partial(jax.jit, static_argnames=("model", "most"))
def score(
    model: nn.Module, most: int, params: dict, tokens: jax.Array, start: jax.Array, count: jax.Array
) -> dict[str, jax.Array]:
    """Log-probabilities (nats) `log_probability` [B, 2] of continuations: of all their tokens together.

    Those of tokens [B, 2, T] begin at `start` [B] and have `count` [B, 2] tokens, `most` at most. Logits are formed for
    these alone. B is a multiple of the devices.
    """

    def on_one_device(params, tokens, start, count):
        batch, _, length = tokens.shape
        index = start[:, None] + jnp.arange(most)
        index = jnp.broadcast_to(index[:, None], (batch, 2, most))
        hidden = model.apply({"params": params}, tokens.reshape(2 * batch, length), method="hidden_states")
        hidden = hidden.reshape(batch, 2, length, -1)
        # Beyond the end of the shorter continuation anything may be read: it does not count.
        before = jnp.take_along_axis(hidden, index[..., None] - 1, axis=2, mode="clip")
        logits = model.apply({"params": params}, before, method="logits")
        token = jnp.take_along_axis(tokens, index, axis=2, mode="clip")
        each = jnp.take_along_axis(jax.nn.log_softmax(logits), token[..., None], axis=-1)[..., 0]
        return {"log_probability": jnp.where(jnp.arange(most) < count[..., None], each, 0).sum(axis=-1)}

    return over_devices(on_one_device)(params, tokens, start, count)


def model_scorer(model: nn.Module, params: dict, label: str, journal: Path | None = None) -> Scorer:
    """A scorer of a model of this project; see `score_samples` for what `journal` does."""

    def scorer(prompts: CompletionPrompts) -> np.ndarray:
        n = len(prompts.start)
        return score_samples(
            partial(score, model, int(prompts.count.max()), on_all_devices(params)),
            zip(prompts.tokens, prompts.start, np.tile(prompts.count, (n, 1)), strict=True),
            n,
            batch=BATCH,
            made_of=fingerprint({"score": "flip", "model": dataclasses.asdict(model.cfg)}, params),
            label=label,
            journal=journal,
            unit="prompts",
        )["log_probability"]

    return scorer


def completion_flip(prompts: CompletionPrompts, scorer: Scorer) -> dict:
    """What a scorer (prompts -> log-probabilities [n, 2] of right and wrong continuations) makes of them, as JSON.

    `period`: of the log-odds, their mean over filler families, with its p-value; None where none stands out. Each
    family has its own beside it. `odds_range`: the lowest and the highest of these means over families; `explained`:
    the share of their variance over lengths that is between the period's phases. `groups`: the phases (length mod
    period) at which the mean log-odds prefer the right continuation and those at which they do not, with mean
    probabilities of both; `following`: how many of the `rankings` (families × lengths) prefer what their phase does.
    `wrong`: how many prefer the wrong one.
    """
    families, lengths = len(prompts.fillers), prompts.lengths
    log_probability = np.asarray(scorer(prompts), np.float64).reshape(families, len(lengths), 2)
    probability, odds = np.exp(log_probability), log_probability[..., 0] - log_probability[..., 1]
    prefers_right, mean_odds = odds > 0, odds.mean(axis=0)
    found = sweep_period(mean_odds)

    def period_of(found) -> dict:
        return {"period": found and found.period, "p_value": found and found.p_value}

    report = {
        "lengths": lengths.tolist(),
        **period_of(found),
        "harmonics": list(found.harmonics) if found else None,
        "rankings": int(odds.size),
        "wrong": int((~prefers_right).sum()),
        "difference": [float(x) for x in np.quantile(probability[..., 0] - probability[..., 1], (0, 1))],
        "odds_range": [float(mean_odds.min()), float(mean_odds.max())],
        "explained": None,
        "groups": None,
        "following": None,
        "families": [
            {
                "filler": filler,
                "right": probability[i, :, 0].tolist(),
                "wrong": probability[i, :, 1].tolist(),
                "log_odds": odds[i].tolist(),
                **period_of(sweep_period(odds[i])),
            }
            for i, filler in enumerate(prompts.fillers)
        ],
    }
    if found:
        phase = lengths % found.period
        of_phase = np.array([mean_odds[phase == p].mean() for p in range(found.period)])
        preferred = of_phase > 0
        report["explained"] = float(of_phase[phase].var() / mean_odds.var())
        report["groups"] = [
            {
                "prefers": name,
                "phases": np.flatnonzero(group).tolist(),
                "right": float(probability[:, group[phase], 0].mean()),
                "wrong": float(probability[:, group[phase], 1].mean()),
            }
            for name, group in (("right", preferred), ("wrong", ~preferred))
            if group.any()
        ]
        report["following"] = int((prefers_right == preferred[phase]).sum())
    return report
