"""Windowed gating: softmax over the offsets of every window, weighted sum of the payloads (SPEC §2)."""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Form, Implementation, choose, in_parts, platform
from pallas_kernels.windowed_gating import by_offset, reference
from pallas_kernels.windowed_gating.reference import weighted_sum, windowed_gates
from phase_jax.axes import Entries, GateBias, GateLogits, Payload
from phase_jax.geometry import Windows

__all__ = ["weighted_sum", "windowed_gates", "windowed_gating"]


def windowed_gating(
    payload: Payload,
    logits: GateLogits,
    bias: GateBias | None,
    windows: Windows,
    implementation: Implementation | None = None,
) -> Entries:
    """Entries [B, J, K, H] of payload streams [B, T, M, K, H] under gate logits [B, T, M, K, g]; see reference.py.

    `implementation` None takes the default of platform, kind of call and dtype (pallas_kernels/dispatch.py).
    Raises NotImplementedError, with the reason, where the one asked for cannot serve the call.
    """
    parts = in_parts("btmkh btmkg wkg -> bjkh", payload, logits, bias)
    why_not = unsupported(*parts.shapes[:2], windows)
    form = choose("windowed_gating", implementation, kind(logits, windows), payload.dtype, why_not)
    if form.name == "xla" or not windows.count(payload.shape[1]):
        return plain(windows)(payload, logits, bias, windows)
    from pallas_kernels.windowed_gating import vjp  # importing Pallas takes a second, and CPUs never need it

    return parts.run(lambda *arguments: vjp.windowed_gating(form, *arguments, windows))


def plain(windows: Windows):
    """The form in plain JAX: stacked reshapes on TPUs, where slices with a stride cost a change of layout, and for wide
    windows; slices elsewhere."""
    return (reference if platform() == "tpu" or windows.width > by_offset.MOST else by_offset).windowed_gating


def kind(logits: GateLogits, windows: Windows) -> str:
    """Row of the table of defaults: gates for every channel or one a head, windows that share tokens or not."""
    gates = "scalar" if logits.shape[-1] == 1 else "vector"
    return f"{gates}, {'overlapping' if windows.width > windows.stride else 'disjoint'}"


def unsupported(payload: Payload, logits: GateLogits, windows: Windows):
    """For `choose`: why the Pallas form of a platform cannot serve this call, or None."""

    def reason(form: Form) -> str | None:
        scalar = logits.shape[-1] == 1
        _, _, streams, kv_heads, head_dim = payload.shape
        width = head_dim if scalar else kv_heads * head_dim
        # A TPU's block may also hold the whole of a smaller array; interpreted, it may hold anything.
        anything = form.name == "tpu" and (form.interpret or (streams == 1 and (not scalar or kv_heads == 1)))
        if payload.dtype not in (jnp.bfloat16, jnp.float32):
            return f"payloads are {payload.dtype}: bfloat16 or float32 is needed"
        if streams not in (1, windows.streams):
            return f"{streams} payload streams: 1 or ⌈W/S⌉ = {windows.streams} are needed"
        if not scalar and (logits.shape != payload.shape or logits.dtype != payload.dtype):
            return f"vector gates {logits.shape} {logits.dtype} differ from payloads {payload.shape} {payload.dtype}"
        if width % 128 and not anything:
            return f"{width} channels {'a head' if scalar else 'of all KV heads'}: a multiple of 128 is needed"
        if form == Form("gpu") and jax.default_backend() == "gpu":
            capability = getattr(jax.devices("gpu")[0], "compute_capability", None)
            if capability is None or float(capability) < 9:
                return f"compute capability {capability}: Hopper's 9.0 or a later one is needed"
        return None

    return reason
