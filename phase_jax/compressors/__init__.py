"""Compressors by name: how many gate numbers a KV head has for each offset (SPEC §2).

All three are the one windowed compressor of `windowed.py`; a gate of width None has no parameters and weighs every
present offset alike.
"""

from phase_jax.compressors.windowed import branch_shapes, compress, gate_weights

GATE_WIDTHS = {
    "scalar": lambda head_dim: 1,
    "vector": lambda head_dim: head_dim,
    "uniform": lambda head_dim: None,
}

__all__ = ["GATE_WIDTHS", "branch_shapes", "compress", "gate_weights"]
