"""A compressed model that begins as a full-attention one: the same weights, every offset's map the ordinary one."""

import numpy as np

from phase_jax.compressors import GATE_WIDTHS, branch_shapes
from phase_jax.errors import UserError
from phase_jax.model.config import ModelConfig

# What may differ between the two: how memory is compressed, and what changes no parameter's meaning.
_FREE = {
    *("window", "stride", "origin", "gate", "gate_bias", "map_sharing", "post_norm", "exact", "exact_width", "tied_kv"),
    *("attention_block", "initial_std", "embedding_std", "dtype", "remat"),
}


def check_transfer(source: ModelConfig, wanted: ModelConfig) -> None:
    """Raises UserError where `source` is compressed, or the two models differ in more than their memory."""
    if source.windows is not None:
        raise UserError("--init-from needs a full-attention model: the one named is compressed itself")
    differs = [
        f"{name} is {getattr(source, name)}, not {getattr(wanted, name)}"
        for name in ModelConfig.__dataclass_fields__
        if name not in _FREE and getattr(source, name) != getattr(wanted, name)
    ]
    if differs:
        raise UserError(f"--init-from: the model named differs in more than its memory ({'; '.join(differs)})")


def compressed_from_full(params: dict, source: ModelConfig, wanted: ModelConfig) -> dict:
    """Parameters of `wanted` made of a full-attention model's: numpy trees in, numpy tree out.

    Payload maps C are W_k and W_v at every offset and gates are neutral (Z and b zero), so that an entry begins as the
    mean of its tokens' keys or values; post-norm scales are 1. A full-attention `wanted` gets the parameters as they
    are. Raises UserError as `check_transfer` does.
    """
    check_transfer(source, wanted)
    if wanted.windows is None:
        return params
    attention = dict(params["layers"]["attention"])
    shapes = branch_shapes(
        wanted.windows,
        wanted.map_sharing,
        wanted.width,
        wanted.kv_heads,
        wanted.head_dim,
        GATE_WIDTHS[wanted.gate](wanted.head_dim),
        wanted.gate_bias,
        wanted.post_norm,
    )

    def branch(projection: np.ndarray) -> dict:
        start = {"payload": projection[:, None], "gate": 0.0, "bias": 0.0, "norm": 1.0}
        return {
            name: np.broadcast_to(np.float32(start[name]), (wanted.layers, *shape)).copy()
            for name, shape in shapes.items()
        }

    attention["compress_key"] = branch(attention["key"])
    value = attention.pop("value") if wanted.tied_kv else attention["value"]
    if not wanted.tied_kv:
        attention["compress_value"] = branch(value)
    return {**params, "layers": {**params["layers"], "attention": attention}}
