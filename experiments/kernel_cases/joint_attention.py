"""Joint attention: the Pallas form against plain JAX, dense and in blocks of two sizes."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from experiments.kernel_cases import Case, normal
from pallas_kernels.joint_attention import joint_attention, kind
from phase_jax.geometry import ExactBranch, Windows


def _case(
    exact: ExactBranch,
    batch: int,
    length: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    dense: bool = True,
) -> Case:
    count = exact.windows.count(length) if exact.windows else 0
    shapes = [(batch, length, heads, head_dim)]
    shapes += [(batch, count, kv_heads, head_dim)] * 2 * (count > 0) + [(batch, length, kv_heads, head_dim)] * 2
    numbers = [math.prod(shape) for shape in shapes]
    item = jnp.dtype(dtype).itemsize
    t = np.arange(length)
    seen = (t + 1 - exact.first(t)).sum() + (exact.windows.closed(t).sum() if exact.windows else 0)
    products = 2 * batch * heads * head_dim * int(seen)  # operations of one matrix product over all that is seen

    def arguments(key):
        return tuple(x.astype(dtype) for x in normal(key, *shapes))

    def form(**options):
        def run(q, *keys_and_values):
            *entries, k, v = keys_and_values
            return joint_attention(q, tuple(entries) or None, (k, v), exact, **options)

        return run

    def cudnn(q, *keys_and_values):
        """cuDNN's attention over as many keys a query, which all see."""
        keys = length if exact.windows is None else -(-int(seen) // length // 64) * 64
        k, v = (x[:, :keys] for x in keys_and_values[-2:])
        return jax.nn.dot_product_attention(q, k, v, is_causal=exact.windows is None, implementation="cudnn")

    blockwise = {f"blocks of {size}": form(implementation="xla", block=size) for size in (512, 256)}
    branch = f"{exact.windows.width}/{exact.windows.stride} {exact.rule}" if exact.windows else "full"
    # Everything once, and out; backward that again, with the cotangent, one logarithm a query and all gradients.
    least = (sum(numbers) + numbers[0]) * item
    return Case(
        kernel="joint_attention",
        name=f"{branch}, N {heads}, K·H {kv_heads}·{head_dim}, B {batch}, T {length}, {dtype}",
        kind=kind(exact),
        dtype=dtype,
        arguments=arguments,
        pallas=form(implementation="pallas"),
        xla=blockwise | ({"dense": form(implementation="xla")} if dense else {}),
        gradients=tuple(range(len(shapes))),
        bytes_least=least,
        bytes_least_grad=2 * least + (numbers[0] + sum(numbers)) * item + 4 * batch * length * heads,
        flops=2 * products,
        flops_grad=7 * products,
        peers={"cuDNN, as many keys": cudnn} if dtype == "bfloat16" else {},
    )


def _branch(width: int, stride: int, rule: str) -> ExactBranch:
    return ExactBranch(Windows(width, stride), rule, 16)


_FULL = ExactBranch(None)

CASES = (
    _case(_branch(8, 8, "window"), 1, 8192, 16, 1, 128, "bfloat16"),
    _case(_branch(8, 4, "window"), 1, 8192, 16, 8, 128, "bfloat16"),
    _case(_branch(8, 8, "tail"), 1, 8192, 16, 1, 128, "bfloat16"),
    _case(_branch(12, 12, "none"), 1, 8192, 16, 4, 128, "bfloat16"),
    _case(_FULL, 1, 8192, 16, 1, 128, "bfloat16"),
    _case(_branch(8, 8, "window"), 1, 32_768, 16, 1, 128, "bfloat16", dense=False),
    # The lab's: training, and a context of more than its size.
    _case(_branch(8, 8, "window"), 32, 96, 4, 1, 32, "float32"),
    _case(_branch(8, 8, "window"), 1, 4096, 4, 1, 32, "float32"),
    _case(_branch(8, 4, "tail"), 1, 1024, 4, 1, 32, "float32"),
    _case(_FULL, 1, 1024, 4, 1, 32, "float32"),
)
