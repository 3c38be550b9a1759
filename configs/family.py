"""The controlled family of SPEC §3: every id, at lab and at paper scale."""

import dataclasses
from typing import Literal

from ml_collections import ConfigDict, config_dict

from phase_jax.errors import UserError
from phase_jax.model.config import ModelConfig
from phase_jax.run import RunConfig
from phase_jax.suggest import unknown

Scale = Literal["lab", "paper"]


def _compressed(width: int, stride: int, kv_heads: int = 1, **differs) -> dict:
    return {"window": width, "stride": stride, "kv_heads": kv_heads, **differs}


# Our choices where the paper is silent on its "DeepSeek-style" kernel: see SPEC §3, rows 25 and 26.
_DSV4 = {"origin": -4, "map_sharing": "part", "tied_kv": True, "rope_dims": 16}

FAMILY: dict[str, dict] = {
    "full_attn_1kv": {"kv_heads": 1},
    "full_attn_4kv": {"kv_heads": 4},
    "full_attn_8kv": {"kv_heads": 8},
    "kvc_w8s8_1kv_baseline": _compressed(8, 8),
    "kvc_w8s8_1kv_baseline_seed43": _compressed(8, 8),
    "kvc_w8s8_1kv_baseline_seed44": _compressed(8, 8),
    "kvc_w8s8_1kv_baseline_seed45": _compressed(8, 8),
    "kvc_w4s4_1kv": _compressed(4, 4),
    "kvc_w8s4": _compressed(8, 4),
    "kvc_w8s6": _compressed(8, 6),
    "kvc_w12s12_1kv": _compressed(12, 12),
    "kvc_w8s8_2kv": _compressed(8, 8, 2),
    "kvc_w8s8_4kv": _compressed(8, 8, 4),
    "kvc_w8s8_8kv": _compressed(8, 8, 8),
    "kvc_w8s8_1kv_kvshare": _compressed(8, 8, tied_kv=True),
    "kvc_w8s8_1kv_meanpool": _compressed(8, 8, gate="uniform"),
    "kvc_w8s8_1kv_mean_kvshare_postnorm": _compressed(8, 8, gate="uniform", tied_kv=True, post_norm=True),
    "kvc_w8s8_1kv_vector": _compressed(8, 8, gate="vector"),
    "kvc_w8s8_1kv_noQKnorm": _compressed(8, 8, qk_norm=False),
    "kvc_w8s8_1kv_nobias": _compressed(8, 8, gate_bias=False),
    "kvc_w8s8_1kv_nope": _compressed(8, 8, rope_dims=0),
    "kvc_w8s8_1kv_rope16": _compressed(8, 8, rope_dims=16),
    "kvc_w8s8_1kv_tail_concat": _compressed(8, 8, exact="tail"),
    "kvc_w8s8_8kv_tail_concat": _compressed(8, 8, 8, exact="tail"),
    "kvc_w8s4_dsv4kernel_1kv_rope16": _compressed(8, 4, gate="vector", **_DSV4),
    "kvc_w8s4_dsv4kernel_1kv_scalar_rope16": _compressed(8, 4, **_DSV4),
    "kvc_w12s12_4kv": _compressed(12, 12, 4),
}

# Backbone of Qwen3-0.6B (SPEC §3) and of the lab (SPEC §9).
_PAPER = {"dtype": "bfloat16", "remat": True}
_LAB = {
    "layers": 2,
    "width": 64,
    "mlp_width": 128,
    "vocabulary": 131,
    "rope_theta": 100.0,
    "initial_std": None,
    "embedding_std": 0.08,
    "logit_scale": 1.0,
}


def model_config(variant: str, scale: Scale = "lab") -> ModelConfig:
    """The model of one id of the family. Raises UserError for an unknown id, naming the nearest."""
    if variant not in FAMILY:
        raise UserError(unknown("model id", variant, FAMILY, "phase-jax configs lists them"))
    row = FAMILY[variant]
    if scale == "paper":
        return ModelConfig(**_PAPER, **row)
    many_heads = row["kv_heads"] >= 4
    heads = {"query_heads": 8, "head_dim": 16} if many_heads else {"query_heads": 4, "head_dim": 32}
    return ModelConfig(**_LAB, **heads, exact_width=12 if row.get("window") == 12 else 8, **row)


def default_seed(variant: str) -> int:
    """The seed an id is trained with: replicas of the reference model carry theirs in the name, the rest have 42."""
    _, marked, seed = variant.partition("_seed")
    return int(seed) if marked else 42


def as_config_dict(run: RunConfig) -> ConfigDict:
    """A run as the ConfigDict that flags override; a field that is null takes a number."""

    def overridable(name, value):
        if isinstance(value, dict):
            return {key: overridable(key, inner) for key, inner in value.items()}
        kind = str if name == "init_from" else float if name.endswith("_std") else int
        return config_dict.placeholder(kind) if value is None else value

    return ConfigDict(overridable("", dataclasses.asdict(run)))
