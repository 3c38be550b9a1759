"""The Qwen3 backbone with exact or chunk-compressed attention, as thin Linen shells that name the parameters."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode import decode_attention
from pallas_kernels.joint_attention import blockwise_attention, joint_attention
from phase_jax.axes import Hidden, Tokens
from phase_jax.compressors import GATE_WIDTHS, branch_shapes, compress, gate_weights
from phase_jax.geometry import Windows
from phase_jax.layers import rms_norm, rotate, rotation, swiglu
from phase_jax.model.attention import last_output, last_weights
from phase_jax.model.cache import LayerCache, append, cached_keys_and_values, closing, closing_windows
from phase_jax.model.config import ModelConfig
from phase_jax.model.intervention import UNCHANGED, Intervention

_ones = nn.initializers.ones_init()
_zeros = nn.initializers.zeros_init()


def _matrix(cfg: ModelConfig, inputs: int, residual: bool = False):
    """Initialiser of a projection or map of so many inputs; `residual` where its output joins the residual stream."""
    spread = inputs**-0.5 * ((2 * cfg.layers) ** -0.5 if residual else 1)
    return nn.initializers.normal(spread if cfg.initial_std is None else cfg.initial_std)


# Gates begin near indifference, so that which offsets they come to prefer is learned (SPEC §8, Theorem 2).
_gate = nn.initializers.normal(0.02)


def _by_batch(hidden: Hidden) -> Hidden:
    """Where a mesh is in context, keeps hidden states split by batch alone: propagation from the weights would not."""
    return nn.with_logical_constraint(hidden, ("batch", None, None))


class Turns(NamedTuple):
    """RoPE's (cos, sin) tables at the positions of the tokens and of the entries that they close.

    `entry` is None in full attention.
    """

    token: tuple[jax.Array, jax.Array]
    entry: tuple[jax.Array, jax.Array] | None


def turns(cfg: ModelConfig, length: int, start: jax.Array | None = None) -> Turns:
    """The tables of a whole sequence of `length` tokens, or of as many from position `start` of a cache on."""

    def tables(positions):
        return rotation(positions, cfg.rope_theta, cfg.rotated)

    windows = cfg.windows
    token = tables(np.arange(length) + (0 if start is None else start))
    if windows is None:
        return Turns(token, None)
    entries = np.arange(windows.count(length)) if start is None else closing(windows, start, length)
    return Turns(token, tables(windows.rope_position(entries)))


def sow(module: nn.Module, name: str, value: Callable[[], Any]) -> None:
    """Leaves a value for whoever asks with `mutable="intermediates"`; no work where nobody does."""
    if module.is_mutable_collection("intermediates"):
        module.sow("intermediates", name, value())


class CompressorBranch(nn.Module):
    """Names the parameters of one branch of the compressor; returns entries [B, J, K, H]."""

    cfg: ModelConfig

    @nn.compact
    def __call__(
        self, hidden: Hidden, windows: Windows, present: jax.Array | None = None, gates: jax.Array | None = None
    ) -> jax.Array:
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
        init = {"payload": _matrix(cfg, cfg.width), "gate": _gate, "bias": _zeros, "norm": _ones}
        params = {name: self.param(name, init[name], shape) for name, shape in shapes.items()}
        sow(self, "gates", lambda: gate_weights(params, hidden, windows))
        return compress(params, hidden, windows, cfg.norm_eps, present, gates)


class Attention(nn.Module):
    """Attention: normed hidden states [B, T, D] -> [B, T, D].

    Without a cache the tokens are the whole sequence; with one they begin at position `start`, after what the cache
    holds, and the cache that holds them too is returned. With `last_only` the last token alone asks: [B, 1, D].
    """

    cfg: ModelConfig
    last_only: bool = False

    @nn.compact
    def __call__(
        self,
        hidden: Hidden,
        turns: Turns,
        start: jax.Array | None,
        cache: LayerCache | None,
        change: Intervention,
    ) -> tuple[Hidden, LayerCache | None]:
        cfg = self.cfg
        windows, exact, block = cfg.windows, cfg.exact_branch, cfg.attention_block
        q_norm, k_norm = (self.param(n, _ones, (cfg.head_dim,)) if cfg.qk_norm else None for n in ("q_norm", "k_norm"))

        def project(name, heads, hidden=hidden):
            weight = self.param(name, _matrix(cfg, cfg.width), (cfg.width, heads, cfg.head_dim))
            return jnp.einsum("btd,dnh->btnh", hidden, weight.astype(hidden.dtype))

        def positioned(x, norm, turn):
            return rotate(rms_norm(x, norm, cfg.norm_eps) if cfg.qk_norm else x, *turn)

        def entries(hidden, windows, present=None):
            entry_k = CompressorBranch(cfg, name="compress_key")(hidden, windows, present, change.key_gates)
            entry_k = positioned(entry_k, k_norm, turns.entry)
            if cfg.tied_kv:
                return entry_k, entry_k
            entry_v = CompressorBranch(cfg, name="compress_value")(hidden, windows, present, change.value_gates)
            return entry_k, entry_v

        asking = slice(-1, None) if self.last_only else slice(None)
        q = project("query", cfg.query_heads, hidden[:, asking])
        q = positioned(q, q_norm, [table[asking] for table in turns.token])
        k = positioned(project("key", cfg.kv_heads), k_norm, turns.token)
        v = k if cfg.tied_kv else project("value", cfg.kv_heads)
        if cache is not None:
            closed = entries(*closing_windows(cache, hidden, windows, start)) if windows else None
            far, near = cached_keys_and_values(cache, (k, v), closed, exact, start)
            if q.shape[1] == 1:
                mixed = decode_attention(q[:, 0], far, near, exact, start)[:, None]
            else:
                mixed = blockwise_attention(q, far, near, exact, start, block)
            cache = append(cache, hidden, (k, v), far, start)
        else:
            closed = entries(hidden, windows) if windows else None
            sow(self, "last_weights", lambda: last_weights(q, closed[0] if closed else None, k, exact))
            if self.last_only:
                mixed = last_output(q, closed, (k, v), exact, change.exact)[:, None]
            else:
                mixed = joint_attention(q, closed, (k, v), exact, block=block)
                if change.exact is not None:
                    mixed = mixed.at[:, -1].set(last_output(q, closed, (k, v), exact, change.exact))
        sow(self, "heads", lambda: mixed)
        if change.heads is not None:
            where, value = (part[:, asking] for part in change.heads)
            mixed = jnp.where(where[..., None], value.astype(mixed.dtype), mixed)
        out = self.param(
            "out",
            _matrix(cfg, cfg.query_heads * cfg.head_dim, residual=True),
            (cfg.query_heads, cfg.head_dim, cfg.width),
        )
        return jnp.einsum("btnh,nhd->btd", mixed, out.astype(mixed.dtype)), cache


class Mlp(nn.Module):
    """SwiGLU: [B, T, D] -> [B, T, D]."""

    cfg: ModelConfig

    @nn.compact
    def __call__(self, hidden: Hidden) -> Hidden:
        width, inner = self.cfg.width, self.cfg.mlp_width
        gate = self.param("gate", _matrix(self.cfg, width), (width, inner))
        up = self.param("up", _matrix(self.cfg, width), (width, inner))
        down = self.param("down", _matrix(self.cfg, inner, residual=True), (inner, width))
        return swiglu(hidden, gate, up, down)


class Block(nn.Module):
    """One pre-norm layer; shaped for nn.scan: (hidden, its cache) of what is in common and its own.

    With `last_only` hidden states [B, 1, D] of the last position alone.
    """

    cfg: ModelConfig
    last_only: bool = False

    @nn.compact
    def __call__(
        self,
        hidden: Hidden,
        turns: Turns,
        start: jax.Array | None = None,
        cache: LayerCache | None = None,
        change: Intervention = UNCHANGED,
    ) -> tuple[Hidden, LayerCache | None]:
        cfg = self.cfg

        def normed(name):
            return rms_norm(hidden, self.param(name, _ones, (cfg.width,)), cfg.norm_eps)

        sow(self, "hidden", lambda: hidden)
        attention = Attention(cfg, self.last_only, name="attention")
        mixed, cache = attention(normed("attention_norm"), turns, start, cache, change)
        hidden = (hidden[:, -1:] if self.last_only else hidden) + mixed
        hidden = hidden + Mlp(cfg, name="mlp")(normed("mlp_norm"))
        return _by_batch(hidden), cache


def _layers(cfg: ModelConfig, **place) -> nn.Module:
    """The layers of a model, one after the other, as one module with stacked parameters; `place` is linen's parent."""
    return nn.scan(
        nn.remat(Block, prevent_cse=False) if cfg.remat else Block,
        # A loop saves its intermediate results in stacked arrays; where there are few layers, copying costs more
        # than compiling each.
        unroll=cfg.layers if cfg.layers <= 4 else 1,
        variable_axes={"params": 0, "intermediates": 0},
        split_rngs={"params": True},
        in_axes=(nn.broadcast, nn.broadcast, 0, 0),
        length=cfg.layers,
    )(cfg, **place)


class Transformer(nn.Module):
    """Decoder-only model of SPEC §3.

    `init(key, tokens)` and `apply({"params": …}, tokens [B, T])` -> f32 logits [B, T, V], or [B, V] of the last
    position alone with `last_only`. Where only some positions are wanted, `hidden_states` and `logits` are the parts.
    `change` is an intervention on the pass. With `mutable="intermediates"` it also returns what layers leave: `hidden`,
    their inputs [L, B, T, D]; of attention `heads` [L, B, T, N, H], `last_weights` and each branch's `gates`.
    """

    cfg: ModelConfig

    def setup(self):
        cfg = self.cfg
        embedding_init = nn.initializers.normal(cfg.embedding_std)
        self.embedding = self.param("embedding", embedding_init, (cfg.vocabulary, cfg.width))
        if not cfg.tied_embeddings:
            self.unembedding = self.param("unembedding", embedding_init, (cfg.vocabulary, cfg.width))
        self.layers = _layers(cfg)
        self.final_norm = self.param("final_norm", _ones, (cfg.width,))

    def __call__(self, tokens: Tokens, last_only: bool = False, change: Intervention = UNCHANGED) -> jax.Array:
        whole = self.is_initializing() or self.is_mutable_collection("intermediates")
        if last_only and not whole:
            return self.logits(self._last_hidden(tokens, change))
        hidden = self.hidden_states(tokens, change)
        return self.logits(hidden[:, -1] if last_only else hidden)

    def hidden_states(self, tokens: Tokens, change: Intervention = UNCHANGED) -> Hidden:
        """What the last layer leaves, before the final norm: [B, T, D]."""
        return self.layers(self._embed(tokens), turns(self.cfg, tokens.shape[1]), None, None, change)[0]

    def _last_hidden(self, tokens: Tokens, change: Intervention) -> jax.Array:
        """`hidden_states` of the last position [B, D]; in the last layer no other position asks or goes on."""
        cfg, tables = self.cfg, turns(self.cfg, tokens.shape[1])
        hidden, own = self._embed(tokens), (self.layers.variables["params"], change)

        def run(layers, hidden, own):
            params, change = own
            return layers.apply({"params": params}, hidden, tables, None, None, change)[0]

        if cfg.layers > 1:
            below = _layers(dataclasses.replace(cfg, layers=cfg.layers - 1), parent=None)
            hidden = run(below, hidden, jax.tree.map(lambda leaf: leaf[:-1], own))
        return run(Block(cfg, last_only=True, parent=None), hidden, jax.tree.map(lambda leaf: leaf[-1], own))[:, 0]

    def extend(self, tokens: Tokens, start: jax.Array, layers: LayerCache) -> tuple[Hidden, LayerCache]:
        """What the last layer leaves of tokens that follow `start` cached ones, [B, T, D], and the caches after them.

        `layers` are the layers' caches, stacked.
        """
        return self.layers(self._embed(tokens), turns(self.cfg, tokens.shape[1], start), start, layers, UNCHANGED)

    def _embed(self, tokens: Tokens) -> Hidden:
        return _by_batch(jnp.take(self.embedding, tokens, axis=0).astype(self.cfg.dtype))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Next-token logits in f32 of hidden states [..., D]: [..., V]."""
        normed = rms_norm(hidden, self.final_norm, self.cfg.norm_eps)
        weight = (self.embedding if self.cfg.tied_embeddings else self.unembedding).astype(normed.dtype)
        logits = jnp.einsum("...d,vd->...v", normed, weight, preferred_element_type=jnp.float32)
        return logits * self.cfg.logit_scale
