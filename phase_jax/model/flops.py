"""What a model has to compute, by hand: the numerator of model-FLOPs utilisation."""

import numpy as np

from phase_jax.model.config import ModelConfig


def forward_flops(cfg: ModelConfig, length: int) -> float:
    """FLOPs of matrix products a token, averaged over a sequence of `length` tokens, logits included.

    Two a multiplication and addition. Attention counts the pairs of query and key that see each other, no others, and
    the compressor each token once a window that it is in. Norms, gates' softmaxes and the like count nothing, as is
    usual (Kaplan et al. 2020, Chowdhery et al. 2022).
    """
    kv_width = cfg.kv_heads * cfg.head_dim
    branches = 1 if cfg.tied_kv else 2
    projections = 2 * cfg.query_heads * cfg.head_dim + branches * kv_width + 3 * cfg.mlp_width
    if cfg.window is not None:
        gate = {"scalar": cfg.kv_heads, "vector": kv_width, "uniform": 0}[cfg.gate]
        applied = {"offset": cfg.window / cfg.stride, "part": cfg.windows.streams, "all": 1}[cfg.map_sharing]
        projections += branches * applied * (kv_width + gate)
    attention = 2 * cfg.query_heads * cfg.head_dim * visible_keys(cfg, length)
    return 2.0 * (cfg.layers * (cfg.width * projections + attention) + cfg.vocabulary * cfg.width)


def visible_keys(cfg: ModelConfig, length: int) -> float:
    """Entries and exact tokens that a query sees, averaged over a sequence of `length` tokens."""
    t = np.arange(length)
    entries = cfg.windows.closed(t) if cfg.windows else 0
    return float(np.mean(entries + t + 1 - cfg.exact_branch.first(t)))


def training_flops(cfg: ModelConfig, length: int) -> float:
    """FLOPs of one training step a token: a forward pass, and twice as much for gradients."""
    return 3 * forward_flops(cfg, length)
