"""A softmax that takes its keys and values in parts (Milakov & Gimelshein 2018), in plain jax.numpy."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

MASKED = -1e30  # the score of what a query does not see
_FLOOR = -1e29  # below every score and far above a masked one, so that exp(masked − floor) is exactly 0


class Softmax(NamedTuple):
    """A softmax in progress, f32: the highest score so far, and mass and weighted values relative to it."""

    top: jax.Array  # [B, K, G, q]
    mass: jax.Array  # [B, K, G, q]
    out: jax.Array  # [B, K, G, q, H]

    @classmethod
    def of_nothing(cls, shape: tuple[int, ...], sink: jax.Array | None = None) -> "Softmax":
        """Of queries of `shape` [B, K, G, q, H] that have seen nothing yet, or their head's sink logit [K, G] alone."""
        if sink is None:
            mass = jnp.zeros(shape[:-1])
            return cls(mass + _FLOOR, mass, jnp.zeros(shape))
        sink = jnp.broadcast_to(sink.astype(jnp.float32)[:, :, None], shape[:-1])
        top = jax.lax.stop_gradient(sink)
        return cls(top, jnp.exp(sink - top), jnp.zeros(shape))

    def absorb(self, q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> "Softmax":
        """With keys and values [B, K, U, H] added; queries [B, K, G, q, H], `seen` broadcasts to [B, K, G, q, U]."""
        scores = masked_scores("bkgqh,bkuh->bkgqu", q, k, seen)
        # The result does not depend on the reference point, so no gradient flows through it.
        top = jax.lax.stop_gradient(jnp.maximum(self.top, scores.max(axis=-1)))
        weights = jnp.exp(scores - top[..., None])
        kept = jnp.exp(self.top - top)
        values = jnp.einsum("bkgqu,bkuh->bkgqh", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return Softmax(top, self.mass * kept + weights.sum(axis=-1), self.out * kept[..., None] + values)

    def result(self) -> jax.Array:
        """The weighted values of all that was absorbed, f32 [B, K, G, q, H]."""
        return self.out / self.mass[..., None]


def masked_scores(equation: str, q: jax.Array, k: jax.Array, seen: jax.Array) -> jax.Array:
    """Scores in f32, `MASKED` where a query does not see a key."""
    scores = jnp.einsum(equation, q, k, preferred_element_type=jnp.float32)
    return jnp.where(seen, scores, MASKED)
