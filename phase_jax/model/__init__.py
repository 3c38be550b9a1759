"""The model family: `Transformer(cfg)` and its `ModelConfig`."""

from phase_jax.model.config import ModelConfig
from phase_jax.model.transformer import Transformer

__all__ = ["ModelConfig", "Transformer"]
