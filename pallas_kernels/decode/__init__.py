"""Attention of one new token a sequence over what the cache holds, in one softmax (SPEC §1)."""

import functools
import importlib
from types import ModuleType

import jax
import jax.numpy as jnp

from pallas_kernels.decode import reference
from pallas_kernels.dispatch import Form, Implementation, choose, in_parts
from phase_jax.axes import KeysAndValues
from phase_jax.geometry import ExactBranch


def kind(exact: ExactBranch) -> str:
    """The class of calls that a default holds for."""
    return "entries" if exact.windows else "full"


def decode_attention(
    q: jax.Array,
    far: KeysAndValues,
    near: KeysAndValues | None,
    exact: ExactBranch,
    position: jax.Array,
    sink: jax.Array | None = None,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Attention of queries [B, N, H], one at `position` ([B], or one for all) of each sequence: [B, N, H].

    `far` are the entries [B, J, K, H], of which a query sees those that have closed; in full attention the tokens from
    position 0 on. `near` are the exact tokens from position − reach + 1 on [B, reach, K, H]; None in full attention.
    There may be more of either than a query sees. A head's `sink` logit [N] takes part without a value. The Pallas
    forms have no gradient.

    `implementation` None picks the default of the platform; Pallas raises NotImplementedError where it cannot serve.
    """
    q = jnp.asarray(q)
    position = jnp.broadcast_to(position, q.shape[:1])
    if not far[0].shape[1]:  # no room for an entry: one that nobody sees
        far = tuple(jnp.pad(x, [(0, 0), (0, 1), (0, 0), (0, 0)]) for x in far)
    # From here on counts stand for the geometry: how many of `far` are seen, and which of `near` is the first.
    count = position + 1 if near is None else exact.windows.closed(position)
    first = None if near is None else jnp.maximum(exact.first(position), 0) - (position - exact.reach + 1)
    parts = in_parts("bnh bjkh btkh b b n -> bnh", q, far, near, count, first, sink)
    form = choose(
        "decode", implementation, kind(exact), q.dtype, lambda form: _pallas(form).unsupported(*parts.shapes[:2])
    )
    if form.name == "xla":
        return _by_group(reference.decode_attention, *parts.arguments)
    kernel = functools.partial(_pallas(form).decode_attention, interpret=form.interpret)
    return parts.run(functools.partial(_by_group, kernel))


def _by_group(function, q, far, near, count, first, sink):
    """`function` of scaled queries and sinks that are grouped by the KV head that they read."""
    batch, heads, head_dim = q.shape
    kv_heads = far[0].shape[2]
    q = (q * head_dim**-0.5).reshape(batch, kv_heads, heads // kv_heads, head_dim)
    sink = None if sink is None else sink.astype(jnp.float32).reshape(kv_heads, -1)
    return function(q, far, near, count, first, sink).reshape(batch, heads, head_dim)


def _pallas(form: Form) -> ModuleType:
    """The module of a Pallas form, imported where it is asked for: Pallas takes a second to import."""
    return importlib.import_module(f"{__name__}.{form.name}")
