"""Gate cycling: the gates' maps and biases move by δ offsets, and the payload maps stay (SPEC §7)."""

import jax.numpy as jnp

from phase_jax.data.prompts import RESIDUES
from phase_jax.errors import UserError
from phase_jax.interventions.gates import check_gates
from phase_jax.model import ModelConfig


def check_cycling(config: ModelConfig, deltas: list[int], name: str) -> None:
    """Raises UserError for a model whose offsets are not its phases or cannot be swept, or a δ not within ±(W − 1)."""
    check_gates(config, name)
    if config.window != config.stride:
        raise UserError(
            f"{name} has windows of {config.window} every {config.stride}: gates cycle only where W = S, so that an"
            " offset is a phase; choose such a model"
        )
    if RESIDUES % config.stride:
        raise UserError(
            f"{name} has a stride of {config.stride}, which does not divide the {RESIDUES} residues of a phase sweep:"
            " choose a model whose stride does"
        )
    beyond = [delta for delta in deltas if abs(delta) >= config.window]
    if beyond:
        raise UserError(
            f"--delta {beyond[0]} goes beyond the window: choose within {1 - config.window}:{config.window - 1}"
        )


def cycle_gates(params: dict, delta: int) -> dict:
    """Parameters with Z̃_i = Z_{(i−δ) mod W} and b̃ alike, in both branches of all layers and heads; C as it was.

    A map that all offsets share is its own cycle.
    """

    layers = params["layers"]
    attention = layers["attention"]
    cycled = {
        branch: {
            name: jnp.roll(leaf, delta, axis=1) if name in ("gate", "bias") else leaf for name, leaf in leaves.items()
        }
        for branch, leaves in attention.items()
        if branch.startswith("compress")
    }
    return {**params, "layers": {**layers, "attention": {**attention, **cycled}}}
