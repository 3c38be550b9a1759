"""A cache that decodes: entries, the exact branch and the partial windows' inputs, and nothing else (SPEC §1).

`prefill` reads a prompt, `extend` reads further tokens (one at a time when decoding), `roll_back` forgets the last
ones. A cache is a pytree that goes in and comes out; its length is a traced value, so one compilation serves all.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from phase_jax.axes import Hidden, KeysAndValues, Tokens
from phase_jax.errors import UserError
from phase_jax.geometry import ExactBranch, Windows, cached_numbers
from phase_jax.model.config import ModelConfig


class LayerCache(NamedTuple):
    """What one layer keeps; with a leading axis L, what all keep. `*_v` is None where values are the keys.

    `far` holds entries by index [B, J, K, H]; in full attention, tokens by position. `near` are the last exact tokens
    [B, U, K, H] and `hidden` the last attention inputs [B, U, D], which windows that have not closed yet will need;
    both are rings, in which the token at position p has slot p mod U, and both are None in full attention.
    """

    far_k: jax.Array
    far_v: jax.Array | None
    near_k: jax.Array | None
    near_v: jax.Array | None
    hidden: jax.Array | None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["length", "reached", "layers"],
    meta_fields=["capacity", "rollback"],
)
@dataclasses.dataclass(frozen=True)
class Cache:
    """`length` tokens of every sequence of a batch; `reached` is the most there have ever been, so that what is left of
    `rollback` is known. `capacity` is the most there can be."""

    length: jax.Array
    reached: jax.Array
    layers: LayerCache
    capacity: int
    rollback: int


def empty_cache(cfg: ModelConfig, batch: int, capacity: int, rollback: int = 0) -> Cache:
    """A cache of `batch` sequences without a token yet. Raises UserError for an impossible size."""
    for name, value, least in (("batch", batch, 1), ("capacity", capacity, 1), ("rollback", rollback, 0)):
        if value < least:
            raise UserError(f"cache {name} {value}: it must be at least {least}")
    windows = cfg.windows

    def zeros(length, *rest):
        return jnp.zeros((cfg.layers, batch, length, *rest), cfg.dtype)

    def keys_and_values(length):
        k, v = (zeros(length, cfg.kv_heads, cfg.head_dim) for _ in range(2))
        return k, None if cfg.tied_kv else v

    entries, exact = cached_numbers(windows, cfg.exact_branch, capacity)
    if windows is None:
        layers = LayerCache(*keys_and_values(exact), None, None, None)
    else:
        recent = min(capacity, windows.width - 1 + rollback)
        near = keys_and_values(min(capacity, exact + rollback))
        layers = LayerCache(*keys_and_values(entries), *near, zeros(recent, cfg.width))
    zero = jnp.zeros((), jnp.int32)
    return Cache(zero, zero, layers, capacity, rollback)


def cache_bytes(cache: Cache) -> int:
    """Bytes that the layers' arrays take, as allocated."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(cache.layers))


def prefill(
    model: nn.Module,
    params: dict,
    tokens: Tokens,
    capacity: int | None = None,
    rollback: int = 0,
    chunk: int | None = None,
) -> tuple[jax.Array, Cache]:
    """Reads prompts [B, T] of one length, `chunk` tokens at a time: f32 logits [B, V] of the next token, and the cache.

    `capacity` defaults to T. Raises UserError for an empty prompt, a chunk that is longer, or too small a capacity.
    """
    batch, length = tokens.shape
    chunk = length if chunk is None else chunk
    if length == 0:
        raise UserError("the prompt is empty: at least one token is needed")
    if not 1 <= chunk <= length:
        raise UserError(f"prefill chunk of {chunk} tokens: choose from 1 to {length}, the length of the prompt")
    cache = empty_cache(model.cfg, batch, length if capacity is None else capacity, rollback)
    for start in range(0, length, chunk):
        logits, cache = extend(model, params, cache, tokens[:, start : start + chunk])
    return logits, cache


def extend(model: nn.Module, params: dict, cache: Cache, tokens: Tokens) -> tuple[jax.Array, Cache]:
    """Reads tokens [B, T] after those in the cache: f32 logits [B, V] of the next one, and the cache with them.

    Raises UserError where there is no token, the cache is another model's or batch's, or its capacity is exceeded.
    """
    check(model.cfg, cache, *tokens.shape)
    return extend_unchecked(model, params, cache, tokens)


@partial(jax.jit, static_argnames="model")
def extend_unchecked(model: nn.Module, params: dict, cache: Cache, tokens: Tokens) -> tuple[jax.Array, Cache]:
    """`extend` for use inside jit, where nothing can be raised: beyond the capacity its results are wrong."""
    variables = {"params": params}
    hidden, layers = model.apply(variables, tokens, cache.length, cache.layers, method="extend")
    length = cache.length + tokens.shape[1]
    cache = dataclasses.replace(cache, length=length, reached=jnp.maximum(cache.reached, length), layers=layers)
    return model.apply(variables, hidden[:, -1], method="logits"), cache


def check(cfg: ModelConfig, cache: Cache, batch: int, tokens: int) -> None:
    """Raises UserError unless `tokens` more of `batch` sequences of this model fit into the cache."""
    if tokens < 1:
        raise UserError("no token to read: at least one is needed")
    wanted = jax.eval_shape(lambda: empty_cache(cfg, batch, cache.capacity, cache.rollback)).layers
    for name, ours, theirs in zip(LayerCache._fields, wanted, cache.layers, strict=True):
        ours, theirs = (None if x is None else (x.shape, str(x.dtype)) for x in (ours, theirs))
        if ours != theirs:
            raise UserError(
                f"the cache is of another model or batch: its {name} is {theirs}, this one's {ours}; prefill a new one"
            )
    length = int(cache.length)
    if length + tokens > cache.capacity:
        raise UserError(
            f"the cache has a capacity of {cache.capacity} tokens and holds {length}: {tokens} more do not fit;"
            " prefill one with a larger capacity"
        )


def roll_back(cache: Cache, tokens: int) -> Cache:
    """The cache without its last `tokens` tokens. Raises UserError where it no longer holds what that takes."""
    length, reached = int(cache.length), int(cache.reached)
    left = min(length, length - reached + cache.rollback)
    if not 0 <= tokens <= left:
        raise UserError(
            f"cannot roll back {tokens} tokens: {left} can be (of {length}; the cache was made with rollback"
            f" {cache.rollback}); prefill again up to the position wanted, or with a larger rollback"
        )
    return dataclasses.replace(cache, length=cache.length - tokens)


# What follows runs inside a layer: pure functions of its cache, the new tokens and `start`, the position of the first.


def closing(windows: Windows, start: jax.Array, length: int) -> jax.Array:
    """Indices of the windows that close within `length` tokens from `start` on, [J]; the last may close later."""
    return windows.closed(start - 1) + jnp.arange(windows.most_closing(length))


def closing_windows(
    cache: LayerCache, hidden: Hidden, windows: Windows, start: jax.Array
) -> tuple[Hidden, Windows, jax.Array]:
    """Attention inputs of the windows that `closing` names, from the first one's start on, made for `compress`.

    Returns them [B, T', D], the windows counted from there, and which of the tokens exist [T'].
    """
    behind, length = windows.width - 1, hidden.shape[1]
    first = windows.start(windows.closed(start - 1))
    size = (windows.most_closing(length) - 1) * windows.stride + windows.width
    known = jnp.concatenate([_last(cache.hidden, start, behind), hidden], axis=1)
    known = jnp.pad(known, [(0, 0), (0, size), (0, 0)])
    span = jax.lax.dynamic_slice_in_dim(known, first - (start - behind), size, axis=1)
    return span, Windows(windows.width, windows.stride), first + jnp.arange(size) >= 0


def cached_keys_and_values(
    cache: LayerCache, new: KeysAndValues, closed: KeysAndValues | None, exact: ExactBranch, start: jax.Array
) -> tuple[KeysAndValues, KeysAndValues | None]:
    """(far, near) as `blockwise_attention` wants them: the cache's with the new tokens and the entries they close."""
    windows, length = exact.windows, new[0].shape[1]
    if windows is None:
        added, index, count = new, start + jnp.arange(length), start + length
    else:
        added, index, count = closed, closing(windows, start, length), windows.closed(start + length - 1)
    # What has not closed yet gets an index beyond the end, and so is not written.
    index = jnp.where(index < count, index, cache.far_k.shape[1])

    def with_added(old, added):
        return old.at[:, index].set(added.astype(old.dtype), mode="drop")

    def with_new(ring, new):
        return jnp.concatenate([_last(ring, start, exact.reach - 1), new], axis=1)

    far = _both(with_added, (cache.far_k, cache.far_v), added)
    return far, None if windows is None else _both(with_new, (cache.near_k, cache.near_v), new)


def append(cache: LayerCache, hidden: Hidden, new: KeysAndValues, far: KeysAndValues, start: jax.Array) -> LayerCache:
    """The cache after the new tokens; `far` is what `cached_keys_and_values` returned."""

    def with_new(ring, new):
        slots, length = ring.shape[1], new.shape[1]
        skipped = max(0, length - slots)
        return ring.at[:, (start + jnp.arange(skipped, length)) % slots].set(new[:, skipped:].astype(ring.dtype))

    far_v = None if cache.far_v is None else far[1]
    if cache.near_k is None:
        return LayerCache(far[0], far_v, None, None, None)
    near_v = None if cache.near_v is None else with_new(cache.near_v, new[1])
    return LayerCache(far[0], far_v, with_new(cache.near_k, new[0]), near_v, with_new(cache.hidden, hidden))


def _both(change, old: tuple[jax.Array, jax.Array | None], new: KeysAndValues) -> KeysAndValues:
    """A change of keys and values; where values are the keys, it is made once."""
    k = change(old[0], new[0])
    return k, k if old[1] is None else change(old[1], new[1])


def _last(ring: jax.Array, start: jax.Array, count: int) -> jax.Array:
    """The `count` tokens before position `start` [B, count, …]; at negative positions, anything."""
    return jnp.take(ring, (start - count + jnp.arange(count)) % ring.shape[1], axis=1)
