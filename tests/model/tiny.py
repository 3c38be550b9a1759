"""Every id of the family at a size at which slow checks are quick."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from configs.family import FAMILY, model_config
from phase_jax.model import ModelConfig, Transformer

IDS = list(FAMILY)


def tiny_config(variant: str, **changes) -> ModelConfig:
    """The lab's model of an id with 2 layers of width 16 and heads of 16 channels, 20 tokens in the vocabulary."""
    config = model_config(variant, "lab")
    heads = max(2, config.kv_heads)
    small = {"layers": 2, "width": 16, "query_heads": heads, "head_dim": 16, "mlp_width": 24, "vocabulary": 20}
    return dataclasses.replace(config, **small, **changes)


def draw_params(config: ModelConfig, seed: int = 0) -> dict:
    """Initial parameters, jittered so that no norm is one and no bias is zero."""
    params = Transformer(config).init(jax.random.key(seed), jnp.zeros((1, 16), jnp.int32))["params"]
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + jnp.asarray(rng.normal(0, 0.1, x.shape), x.dtype), params)
