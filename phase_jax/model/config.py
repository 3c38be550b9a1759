"""The one description of a model; everything else reads it, nothing changes it."""

import dataclasses
from typing import Literal

from phase_jax.geometry import ExactBranch, Windows


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder of Qwen3's shape with exact or chunk-compressed attention (SPEC §2, §3).

    `window` None is full attention, and the fields from `stride` to `exact_width` are then without meaning.
    Raises ValueError, naming the field, for a model that cannot exist.
    """

    layers: int = 28
    width: int = 1024
    query_heads: int = 16
    kv_heads: int = 1
    head_dim: int = 128
    mlp_width: int = 3072
    vocabulary: int = 151_936
    rope_theta: float = 1e6
    rope_dims: int | None = None  # rotated channels, the last ones of each head: None for all, 0 for no RoPE
    qk_norm: bool = True
    norm_eps: float = 1e-6
    tied_embeddings: bool = True  # logits reuse the embeddings
    tied_kv: bool = False  # values reuse the normalised, rotated keys; there is no value projection
    window: int | None = None
    stride: int | None = None
    origin: int = 0
    gate: Literal["scalar", "vector", "uniform"] = "scalar"
    gate_bias: bool = True
    # Offsets that share Z and C: none, those of each stride, all; or all share C alone.
    map_sharing: Literal["offset", "part", "all", "payload"] = "offset"
    post_norm: bool = False
    exact: Literal["window", "tail", "none"] = "window"
    exact_width: int = 16
    attention_block: int | None = None  # queries and keys scored at once, memory linear in T; None: all of them
    initial_std: float | None = 0.02  # of projections and maps; None: 1/√inputs, and residual outputs by √(2L) less
    embedding_std: float = 0.02
    logit_scale: float = 1.0
    dtype: Literal["float32", "bfloat16"] = "float32"  # of activations; parameters are always float32
    remat: bool = False  # recompute a layer's activations in the backward pass

    def __post_init__(self):
        for field in ("layers", "width", "query_heads", "kv_heads", "head_dim", "mlp_width", "vocabulary"):
            if getattr(self, field) < 1:
                raise ValueError(f"model.{field} is {getattr(self, field)}: it must be at least 1")
        if self.attention_block is not None and self.attention_block < 1:
            raise ValueError(f"model.attention_block is {self.attention_block}: it must be at least 1, or null")
        if self.query_heads % self.kv_heads:
            raise ValueError(
                f"model.query_heads {self.query_heads} is not a multiple of model.kv_heads {self.kv_heads}"
            )
        if self.rotated % 2 or not 0 <= self.rotated <= self.head_dim:
            raise ValueError(f"model.rope_dims {self.rope_dims}: it must be even, from 0 to head_dim {self.head_dim}")
        for field in dataclasses.fields(self):
            choices = getattr(field.type, "__args__", ())
            if isinstance(field.default, str) and getattr(self, field.name) not in choices:
                raise ValueError(f"model.{field.name} is '{getattr(self, field.name)}': choose {', '.join(choices)}")
        if (self.window is None) != (self.stride is None):
            raise ValueError("model.window and model.stride go together: both are null in full attention")
        _ = self.exact_branch  # raises where windows and exact branch do not fit

    @property
    def rotated(self) -> int:
        """Channels of each head that RoPE turns."""
        return self.head_dim if self.rope_dims is None else self.rope_dims

    @property
    def windows(self) -> Windows | None:
        return Windows(self.window, self.stride, self.origin) if self.window is not None else None

    @property
    def exact_branch(self) -> ExactBranch:
        return ExactBranch(self.windows, self.exact, self.exact_width)
