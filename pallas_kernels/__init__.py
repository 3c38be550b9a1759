"""Kernels, one folder each: the specification in plain JAX, a TPU form, a GPU form, and a dispatch between them.

`reference.py` says what is computed and is what CPUs run; `tpu.py` and `gpu.py` compute the same with Pallas, and
`vjp.py` gives them gradients. A kernel's function takes `implementation=None | "xla" | "pallas"`; how None is decided
is in `dispatch.py`, what it was decided from in `defaults.json`.
"""

from pallas_kernels.dispatch import request

__all__ = ["request"]
