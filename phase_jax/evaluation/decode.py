"""Greedy decoding from the cache, and whether what it generates is right (SPEC §5)."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from phase_jax.axes import Tokens
from phase_jax.errors import UserError
from phase_jax.model.cache import Cache, extend_unchecked, prefill


def greedy(model: nn.Module, params: dict, prompts: Tokens, count: int, chunk: int | None = None) -> np.ndarray:
    """The `count` most likely tokens, one after the other, that follow each prompt of [B, T]: [B, count].

    Raises UserError for no token to make, and what `prefill` raises.
    """
    if count < 1:
        raise UserError(f"{count} tokens to generate: at least one is needed")
    logits, cache = prefill(model, params, prompts, capacity=prompts.shape[1] + count, chunk=chunk)
    return np.asarray(continue_from(model, params, cache, logits, count))


@partial(jax.jit, static_argnames=("model", "count"))
def continue_from(model: nn.Module, params: dict, cache: Cache, logits: jax.Array, count: int) -> jax.Array:
    """The `count` most likely tokens [B, count] after those in the cache, whose next one has these logits [B, V]."""

    def step(carry, _):
        logits, cache = carry
        token = logits.argmax(axis=-1).astype(jnp.int32)
        return extend_unchecked(model, params, cache, token[:, None]), token

    _, tokens = jax.lax.scan(step, (logits, cache), length=count)
    return tokens.T


def is_right(generated: str, gold: str) -> bool:
    """Whether a generated answer, stripped of white space, starts with the gold value.

    Raises UserError for a gold value of white space alone, with which every answer would be right.
    """
    if not gold.strip():
        raise UserError("the gold value is empty: every answer would be right")
    return generated.strip().startswith(gold.strip())
