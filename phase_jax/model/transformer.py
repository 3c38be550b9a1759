"""The Qwen3 backbone with exact or chunk-compressed attention, as thin Linen shells that name the parameters."""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from phase_jax.axes import Hidden, Tokens
from phase_jax.compressors import GATE_WIDTHS, branch_shapes, compress
from phase_jax.layers import rms_norm, rotate, rotation, swiglu
from phase_jax.model.attention import full_attention, joint_attention
from phase_jax.model.config import ModelConfig

_ones = nn.initializers.ones_init()
_zeros = nn.initializers.zeros_init()


def _fan_in(inputs: int):
    """Normal initialiser of standard deviation 1/√inputs."""
    return nn.initializers.normal(inputs**-0.5)


class Turns(NamedTuple):
    """RoPE's (cos, sin) tables at the positions of the tokens and of the entries; `entry` is None in full attention."""

    token: tuple[jax.Array, jax.Array]
    entry: tuple[jax.Array, jax.Array] | None


def turns(cfg: ModelConfig, length: int) -> Turns:
    """The tables of a sequence of `length` tokens."""
    token = rotation(jnp.arange(length), cfg.rope_theta, cfg.rotated)
    if cfg.windows is None:
        return Turns(token, None)
    return Turns(token, rotation(cfg.windows.rope_positions(length), cfg.rope_theta, cfg.rotated))


class CompressorBranch(nn.Module):
    """Names the parameters of one branch of the compressor; returns entries [B, J, K, H]."""

    cfg: ModelConfig

    @nn.compact
    def __call__(self, hidden: Hidden) -> jax.Array:
        cfg = self.cfg
        shapes = branch_shapes(
            cfg.windows,
            cfg.map_sharing,
            cfg.width,
            cfg.kv_heads,
            cfg.head_dim,
            GATE_WIDTHS[cfg.gate](cfg.head_dim),
            cfg.gate_bias,
            cfg.post_norm,
        )
        init = {"payload": _fan_in(cfg.width), "gate": _fan_in(cfg.width), "bias": _zeros, "norm": _ones}
        params = {name: self.param(name, init[name], shape) for name, shape in shapes.items()}
        return compress(params, hidden, cfg.windows, cfg.norm_eps)


class Attention(nn.Module):
    """Attention over the whole sequence: normed hidden states [B, T, D] -> [B, T, D].

    `turns` are RoPE's tables for token positions and for entry positions.
    """

    cfg: ModelConfig

    @nn.compact
    def __call__(self, hidden: Hidden, turns: Turns) -> Hidden:
        cfg = self.cfg
        q_norm, k_norm = (self.param(n, _ones, (cfg.head_dim,)) if cfg.qk_norm else None for n in ("q_norm", "k_norm"))

        def project(name, heads):
            weight = self.param(name, _fan_in(cfg.width), (cfg.width, heads, cfg.head_dim))
            return jnp.einsum("btd,dnh->btnh", hidden, weight.astype(hidden.dtype))

        def positioned(x, norm, turn):
            return rotate(rms_norm(x, norm, cfg.norm_eps) if cfg.qk_norm else x, *turn)

        q = positioned(project("query", cfg.query_heads), q_norm, turns.token)
        k = positioned(project("key", cfg.kv_heads), k_norm, turns.token)
        v = k if cfg.tied_kv else project("value", cfg.kv_heads)
        if cfg.windows is None:
            mixed = full_attention(q, k, v)
        else:
            entry_k = positioned(CompressorBranch(cfg, name="compress_key")(hidden), k_norm, turns.entry)
            entry_v = entry_k if cfg.tied_kv else CompressorBranch(cfg, name="compress_value")(hidden)
            mixed = joint_attention(q, entry_k, entry_v, k, v, cfg.exact_branch)
        out = self.param("out", _fan_in(cfg.query_heads * cfg.head_dim), (cfg.query_heads, cfg.head_dim, cfg.width))
        return jnp.einsum("btnh,nhd->btd", mixed, out.astype(mixed.dtype))


class Mlp(nn.Module):
    """SwiGLU: [B, T, D] -> [B, T, D]."""

    cfg: ModelConfig

    @nn.compact
    def __call__(self, hidden: Hidden) -> Hidden:
        width, inner = self.cfg.width, self.cfg.mlp_width
        gate = self.param("gate", _fan_in(width), (width, inner))
        up = self.param("up", _fan_in(width), (width, inner))
        down = self.param("down", _fan_in(inner), (inner, width))
        return swiglu(hidden, gate, up, down)


class Block(nn.Module):
    """One pre-norm layer; shaped for nn.scan, so it returns (hidden, None)."""

    cfg: ModelConfig

    @nn.compact
    def __call__(self, hidden: Hidden, turns: Turns) -> tuple[Hidden, None]:
        cfg = self.cfg

        def normed(name):
            return rms_norm(hidden, self.param(name, _ones, (cfg.width,)), cfg.norm_eps)

        hidden = hidden + Attention(cfg, name="attention")(normed("attention_norm"), turns)
        hidden = hidden + Mlp(cfg, name="mlp")(normed("mlp_norm"))
        return hidden, None


class Transformer(nn.Module):
    """Decoder-only model of SPEC §3 with tied embeddings.

    `init(key, tokens)` and `apply({"params": …}, tokens [B, T])` -> f32 logits [B, T, V], or [B, V] of the last
    position alone with `last_only`. Where only some positions are wanted, `hidden_states` and `logits` are the parts.
    """

    cfg: ModelConfig

    def setup(self):
        cfg = self.cfg
        embedding_init = nn.initializers.normal(cfg.embedding_std)
        self.embedding = self.param("embedding", embedding_init, (cfg.vocabulary, cfg.width))
        layer = nn.remat(Block, prevent_cse=False) if cfg.remat else Block
        self.layers = nn.scan(
            layer,
            # A loop saves its intermediate results in stacked arrays; where there are few layers, copying costs more
            # than compiling each.
            unroll=cfg.layers if cfg.layers <= 4 else 1,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=cfg.layers,
        )(cfg)
        self.final_norm = self.param("final_norm", _ones, (cfg.width,))

    def __call__(self, tokens: Tokens, last_only: bool = False) -> jax.Array:
        hidden = self.hidden_states(tokens)
        return self.logits(hidden[:, -1] if last_only else hidden)

    def hidden_states(self, tokens: Tokens) -> Hidden:
        """What the last layer leaves, before the final norm: [B, T, D]."""
        hidden = jnp.take(self.embedding, tokens, axis=0).astype(self.cfg.dtype)
        return self.layers(hidden, turns(self.cfg, tokens.shape[1]))[0]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Next-token logits in f32 of hidden states [..., D]: [..., V]."""
        normed = rms_norm(hidden, self.final_norm, self.cfg.norm_eps)
        weight = self.embedding.astype(normed.dtype)
        logits = jnp.einsum("...d,vd->...v", normed, weight, preferred_element_type=jnp.float32)
        return logits * self.cfg.logit_scale
