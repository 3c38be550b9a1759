"""Every id of the family at a size at which slow checks are quick."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from configs.family import FAMILY, model_config
from phase_jax.model import ModelConfig, Transformer

IDS = list(FAMILY)
# Ids of the same model with another seed would only repeat it.
DISTINCT = [variant for variant in IDS if "_seed" not in variant]


def tiny_config(variant: str, **changes) -> ModelConfig:
    """The lab's model of an id with 2 layers of width 16 and heads of 16 channels, 20 tokens in the vocabulary."""
    config = model_config(variant, "lab")
    heads = max(2, config.kv_heads)
    small = {"layers": 2, "width": 16, "query_heads": heads, "head_dim": 16, "mlp_width": 24, "vocabulary": 20}
    return dataclasses.replace(config, **{**small, **changes})


def draw_params(config: ModelConfig, seed: int = 0) -> dict:
    """Random parameters, in which no norm is one and no bias is zero; drawn without compiling anything."""
    model, rng = Transformer(config), np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 16), jnp.int32)))["params"]

    def draw(path, leaf):
        name = path[-1].key
        scale = "norm" in name
        std = 0.1 if scale or name == "bias" else 0.25
        return jnp.asarray(scale + rng.normal(0, std, leaf.shape), leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)
