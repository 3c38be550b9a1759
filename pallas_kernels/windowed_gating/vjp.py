"""Gradients of the Pallas forms: reverse mode only, and the same forward computation with and without it."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Form
from pallas_kernels.windowed_gating import gpu, reference, tpu
from phase_jax.axes import Entries, GateBias, GateLogits, Payload
from phase_jax.geometry import Windows

_FORMS = {"tpu": tpu, "gpu": gpu}


def windowed_gating(
    form: Form, payload: Payload, logits: GateLogits, bias: GateBias | None, windows: Windows
) -> Entries:
    """Entries by the Pallas form named; see reference.py for what they are.

    Scalar gates are a fraction 1/H of the numbers, so their softmax stays in XLA, and the kernel weighs and sums.
    """
    if logits.shape[-1] == 1:
        gates = reference.windowed_gates(logits, bias, windows)[..., 0]
        return _scalar(form, windows, payload, gates_by_token(gates, windows, payload.shape[1]))
    if bias is None:
        bias = jnp.zeros((windows.width, *logits.shape[3:]), jnp.float32)
    return _vector(form, windows, payload, logits, bias)


def gates_by_token(gates: jax.Array, windows: Windows, length: int) -> jax.Array:
    """[B, J, W, K] -> [B, K, M, T]: the weight of every token in the m-th of the M windows that may hold it, else 0."""
    batch, count, width, kv_heads = gates.shape
    parts, stride = windows.streams, windows.stride
    gates = jnp.pad(gates, [(0, 0), (0, 0), (0, parts * stride - width), (0, 0)])
    gates = gates.reshape(batch, count, parts, stride, kv_heads)
    # Part m of window j is chunk j + m of S tokens, counted from the origin.
    rows = [jnp.pad(gates[:, :, m], [(0, 0), (m, parts - 1 - m), (0, 0), (0, 0)]) for m in range(parts)]
    rows = jnp.stack(rows, axis=1).reshape(batch, parts, -1, kv_heads)[:, :, -windows.origin :]
    rows = jnp.pad(rows, [(0, 0), (0, 0), (0, max(0, length - rows.shape[2])), (0, 0)])[:, :, :length]
    return jnp.moveaxis(rows, 3, 1)


def _entries(flat: jax.Array, payload: jax.Array) -> jax.Array:
    return flat.reshape(*flat.shape[:2], *payload.shape[3:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _vector(form: Form, windows: Windows, payload, logits, bias):
    return _entries(_vector_forward(form, windows, payload, logits, bias, with_lse=False)[0], payload)


def _vector_forward(form, windows, payload, logits, bias, with_lse):
    kernel = _FORMS[form.name].vector_forward
    return kernel(windows, payload, logits, bias.astype(jnp.float32), with_lse, form.interpret)


def _vector_fwd(form, windows, payload, logits, bias):
    flat, lse = _vector_forward(form, windows, payload, logits, bias, with_lse=True)
    return _entries(flat, payload), (payload, logits, bias, lse, flat)


def _vector_bwd(form, windows, residuals, out_bar):
    payload, logits, bias, lse, flat = residuals
    backward = _FORMS[form.name].vector_backward
    *bars, bias_bar = backward(windows, payload, logits, bias.astype(jnp.float32), lse, flat, out_bar, form.interpret)
    return *bars, bias_bar.astype(bias.dtype)


_vector.defvjp(_vector_fwd, _vector_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _scalar(form: Form, windows: Windows, payload, weights):
    return _entries(_FORMS[form.name].scalar_forward(windows, payload, weights, form.interpret), payload)


def _scalar_fwd(form, windows, payload, weights):
    return _scalar(form, windows, payload, weights), (payload, weights)


def _scalar_bwd(form, windows, residuals, out_bar):
    return _FORMS[form.name].scalar_backward(windows, *residuals, out_bar, form.interpret)


_scalar.defvjp(_scalar_fwd, _scalar_bwd)
