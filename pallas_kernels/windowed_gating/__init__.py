"""Windowed gating: softmax over the offsets of every window, weighted sum of the payloads (SPEC §2)."""

from typing import Literal

from pallas_kernels.windowed_gating import reference
from pallas_kernels.windowed_gating.reference import weighted_sum, windowed_gates
from phase_jax.axes import Entries, GateBias, GateLogits, Payload
from phase_jax.geometry import Windows

Implementation = Literal["xla"]

__all__ = ["weighted_sum", "windowed_gates", "windowed_gating"]


def windowed_gating(
    payload: Payload,
    logits: GateLogits,
    bias: GateBias | None,
    windows: Windows,
    implementation: Implementation | None = None,
) -> Entries:
    """Entries [B, J, K, H] of payload streams [B, T, M, K, H] under gate logits [B, T, M, K, g]; see reference.py.

    `implementation` None picks the default of the platform. Raises NotImplementedError for one that does not exist.
    """
    if implementation not in (None, "xla"):
        raise NotImplementedError(f"windowed_gating has no implementation '{implementation}'; choose xla")
    return reference.windowed_gating(payload, logits, bias, windows)
