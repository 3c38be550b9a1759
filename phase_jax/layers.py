"""Layers as pure functions: RMSNorm, rotary positions, SwiGLU."""

import jax
import jax.numpy as jnp
import numpy as np


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) · scale over the last axis, computed in f32, returned in x's dtype."""
    x32 = x.astype(jnp.float32)
    normal = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (normal * scale.astype(jnp.float32)).astype(x.dtype)


def rotation(positions: jax.Array | np.ndarray, theta: float, dims: int) -> tuple[jax.Array, jax.Array]:
    """cos and sin of RoPE's angles, each [T, 1, dims/2]: position · θ^(−2i/dims), i = 0 … dims/2 − 1.

    Positions may be negative. Known ones, a numpy array, make constants, so that layers read tables and compute no
    cosine: XLA would fuse a traced one into every use, and compute it anew for each sequence and head.
    """
    known = isinstance(positions, np.ndarray)
    frequency = np.float32(theta) ** (-np.arange(0, dims, 2, dtype=np.float32) / max(dims, 1))
    angle = positions.astype(np.float32)[:, None, None] * frequency
    return (np.cos(angle), np.sin(angle)) if known else (jnp.cos(angle), jnp.sin(angle))


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """RoPE on the last channels of x [..., T, heads, H], as many as the tables turn; channel i pairs with i + half."""
    half = cos.shape[-1]
    if half == 0:
        return x
    x32 = x.astype(jnp.float32)
    kept, first, second = x32[..., : -2 * half], x32[..., -2 * half : -half], x32[..., -half:]
    return jnp.concatenate([kept, first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


@jax.custom_vjp
def project(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., D] @ weight [D, F] -> [..., F].

    The weight's gradient is formed as xᵀ g. Autodiff forms gᵀ x, for which XLA's CPU backend fuses all that makes g, an
    activation's derivative for one, into a transposition, element by element: a sixth of the lab's training step.
    """
    return x @ weight


def _project_fwd(x, weight):
    return x @ weight, (x, weight)


def _project_bwd(kept, gradient):
    x, weight = kept
    return gradient @ weight.T, jnp.einsum("...d,...f->df", x, gradient)


project.defvjp(_project_fwd, _project_bwd)


def swiglu(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """down(silu(gate x) · up x): x [..., D], gate and up [D, F], down [F, D]."""
    gate, up, down = (weight.astype(x.dtype) for weight in (gate, up, down))
    return project(jax.nn.silu(project(x, gate)) * project(x, up), down)
