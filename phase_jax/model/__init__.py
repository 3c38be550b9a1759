"""The model family: `Transformer(cfg)`, its `ModelConfig`, and `Intervention`, what may be changed inside."""

from phase_jax.model.config import ModelConfig
from phase_jax.model.intervention import Heads, Intervention
from phase_jax.model.transformer import Transformer

__all__ = ["Heads", "Intervention", "ModelConfig", "Transformer"]
