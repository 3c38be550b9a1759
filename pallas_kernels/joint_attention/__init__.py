"""Attention of queries over visible entries and exact tokens in one softmax (SPEC §1)."""

import importlib
from types import ModuleType

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Form, Implementation, choose, in_parts
from pallas_kernels.joint_attention import reference
from pallas_kernels.joint_attention.reference import blockwise_attention
from phase_jax.axes import KeysAndValues, Queries
from phase_jax.geometry import ExactBranch

__all__ = ["blockwise_attention", "joint_attention"]


def kind(exact: ExactBranch) -> str:
    """The class of calls that a default holds for."""
    return exact.rule if exact.windows else "full"


def joint_attention(
    q: Queries,
    entries: KeysAndValues | None,
    tokens: KeysAndValues,
    exact: ExactBranch,
    sink: jax.Array | None = None,
    block: int | None = None,
    implementation: Implementation | None = None,
) -> Queries:
    """Whole sequences' attention: queries, and keys and values of `tokens`, at positions 0 … T − 1: [B, T, N, H].

    q [B, T, N, H]; `entries` are keys and values [B, J, K, H], None in full attention; `tokens` [B, T, K, H]. A head's
    `sink` logit [N] takes part in its softmax without a value. XLA scores `block` queries and keys at once, memory
    linear in T, or all of them where it is None.

    `implementation` None picks the default of the platform; Pallas raises NotImplementedError where it cannot serve.
    """
    parts = in_parts("btnh bjkh btkh n -> btnh", q, entries, tokens, sink)
    form = choose(
        "joint_attention", implementation, kind(exact), q.dtype, lambda form: _pallas(form).unsupported(parts.shapes[0])
    )
    if form.name != "xla":
        return parts.run(lambda *arguments: _pallas(form).joint_attention(*arguments, exact, form.interpret))
    if entries is None:
        if block is None:
            return reference.full_attention(q, *tokens, sink)
        return blockwise_attention(q, tokens, None, exact, 0, block, sink)
    if block is None:
        return reference.dense_attention(q, entries, tokens, exact, sink)
    near = tuple(jnp.pad(x, [(0, 0), (exact.reach - 1, 0), (0, 0), (0, 0)]) for x in tokens)
    return blockwise_attention(q, entries, near, exact, 0, block, sink)


def _pallas(form: Form) -> ModuleType:
    """The module of a Pallas form, imported where it is asked for: Pallas takes a second to import."""
    return importlib.import_module(f"{__name__}.{form.name}")
