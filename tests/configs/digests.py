"""Forward digests of every id at a tiny size, so that a change of the numbers is noticed.

    python -m tests.configs.digests

writes digests.json beside this file anew. Do so only where a change of the numbers is meant, and say why in the commit.
Parameters are made by numpy, not by JAX's random generator, so a digest is a function of the forward pass alone.
"""

import json
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from phase_jax.model import ModelConfig, Transformer
from tests.model.tiny import IDS, tiny_config

FILE = Path(__file__).with_name("digests.json")
LENGTH = 41


def drawn(config: ModelConfig) -> dict:
    """Parameters that depend on nothing but their names and shapes; norms lie about 1, the rest about 0."""
    init = Transformer(config).init
    shapes = jax.eval_shape(lambda: init(jax.random.key(0), jnp.zeros((1, 24), jnp.int32))["params"])

    def draw(path, leaf):
        name = jax.tree_util.keystr(path)
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        return jnp.asarray(rng.normal(1.0 if "norm" in name else 0.0, 0.3, leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def digest(variant: str) -> list[float]:
    """Sixteen weighted sums of the logits, of the size of one logit each, so that every logit counts."""
    config = tiny_config(variant, head_dim=32)  # so that RoPE on 16 channels is not all of it
    tokens = np.random.default_rng(1).integers(0, config.vocabulary, (2, LENGTH))
    logits = np.float64(jax.jit(Transformer(config).apply)({"params": drawn(config)}, tokens)).ravel()
    weights = np.random.default_rng(2).normal(size=(16, logits.size)) / np.sqrt(logits.size)
    return [round(float(value), 6) for value in weights @ logits]


def main() -> None:
    FILE.write_text(json.dumps({variant: digest(variant) for variant in IDS}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
