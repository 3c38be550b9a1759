"""What is compiled ahead of time, checked on a device and benchmarked: one list of cases for each kernel.

A kernel joins by a module here with a tuple CASES, named in KERNELS.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

KERNELS = ("windowed_gating", "joint_attention", "decode")


@dataclass(frozen=True)
class Case:
    """One call of a kernel with its competitors.

    `pallas` and every one of `xla` take what `arguments(key)` returns and compute the same output; gradients are of
    the arguments numbered in `gradients`, empty where there is none. `kind` and `dtype` are the call's row in the
    table of defaults. `bytes_least` and `bytes_least_grad` are what any implementation must move through memory,
    forward and forward with backward; `flops` are the operations of its matrix products, 0 where bytes are what counts.
    `peers` take the same arguments and do as much work, but another: GPUs' libraries, timed there beside the forms.
    """

    kernel: str
    name: str
    kind: str
    dtype: str
    arguments: Callable[[jax.Array], tuple]
    pallas: Callable
    xla: Mapping[str, Callable]
    gradients: tuple[int, ...] = ()
    bytes_least: float = 0.0
    bytes_least_grad: float = 0.0
    flops: float = 0.0
    flops_grad: float = 0.0
    peers: Mapping[str, Callable] = field(default_factory=dict)

    def shapes(self) -> tuple:
        """The arguments' shapes and dtypes, nothing computed."""
        return jax.eval_shape(self.arguments, jax.random.key(0))


def with_gradients(function: Callable, gradients: tuple[int, ...]) -> Callable:
    """`function` and its vector-Jacobian product: (cotangent, *arguments) -> (output, gradients)."""

    def both(cotangent, *arguments):
        def of_some(*some):
            full = list(arguments)
            for index, value in zip(gradients, some, strict=True):
                full[index] = value
            return function(*full)

        output, pull = jax.vjp(of_some, *(arguments[index] for index in gradients))
        return output, pull(cotangent.astype(output.dtype))

    return both


def all_cases() -> list[Case]:
    """The cases of every kernel, in the order of KERNELS."""
    return [case for name in KERNELS for case in importlib.import_module(f"experiments.kernel_cases.{name}").CASES]


def normal(key: jax.Array, *shapes: tuple[int, ...], dtype=jnp.float32) -> tuple[jax.Array, ...]:
    """Independent standard normal arrays."""
    return tuple(
        jax.random.normal(k, shape, dtype) for k, shape in zip(jax.random.split(key, len(shapes)), shapes, strict=True)
    )
