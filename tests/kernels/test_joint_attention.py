"""Every form of joint attention against a float64 loop, in values and in gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.joint_attention import joint_attention
from phase_jax.geometry import ExactBranch, Windows
from tests.kernels.attention_loop import Geometry, attention

FORMS = {"dense": {"implementation": "xla"}, "blockwise": {"implementation": "xla", "block": 48}}
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}


def branch_of(geometry: Geometry) -> ExactBranch:
    windows = Windows(geometry.width, geometry.stride, geometry.origin) if geometry.width else None
    return ExactBranch(windows, geometry.rule, geometry.exact_width)


def draw(geometry: Geometry, length: int, heads: int, kv_heads: int, head_dim: int, sink: bool, dtype="float32"):
    """((q, entries, tokens, sink), cotangent) of two sequences."""
    rng = np.random.default_rng([length, heads, head_dim])

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    q, cotangent = array(2, length, heads, head_dim), array(2, length, heads, head_dim)
    tokens = tuple(array(2, length, kv_heads, head_dim) for _ in range(2))
    entries = None
    if geometry.width:
        entries = tuple(array(2, len(geometry.closes(length)), kv_heads, head_dim) for _ in range(2))
    return (q, entries, tokens, array(heads) if sink else None), cotangent


def assert_equals_the_loop(form: str, geometry: Geometry, inputs, cotangent):
    """Values and gradients, relative to the largest of each."""
    exact, dtype = branch_of(geometry), str(cotangent.dtype)

    @jax.jit
    def values_and_gradients(inputs):
        out, back = jax.vjp(lambda *inputs: joint_attention(*inputs[:3], exact, inputs[3], **FORMS[form]), *inputs)
        return out, back(cotangent)

    out, (dq, dentries, dtokens, dsink) = values_and_gradients(inputs)
    expected, gradients = attention(geometry, *inputs, cotangent)
    found = (out, dq, *(dentries or (None, None)), *dtokens, dsink)
    for name, ours, theirs in zip("out q entry_k entry_v k v sink".split(), found, (expected, *gradients), strict=True):
        if ours is not None and ours.size:
            error = np.abs(np.asarray(ours, np.float64) - theirs).max() / max(1, np.abs(theirs).max())
            assert error < TOLERANCE[dtype], f"{name}: {error}"


CASES = [
    # geometry, T, N, K, H, sink
    (Geometry(8, 6, -2, "window", 9), 23, 4, 2, 3, False),
    (Geometry(8, 6, -2, "tail"), 23, 4, 2, 3, True),
    (Geometry(8, 6, -2, "none"), 23, 4, 2, 3, False),
    (Geometry(8, 4, -4, "window", 16), 61, 2, 1, 8, True),
    (Geometry(8, 8, 0, "window", 16), 3, 2, 2, 4, True),
    (Geometry(None), 23, 4, 2, 3, True),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_loop(form, case):
    geometry, *shape = case
    assert_equals_the_loop(form, geometry, *draw(geometry, *shape))


def test_scores_of_any_size_neither_overflow_nor_vanish():
    (q, _, (k, v), _), _ = draw(Geometry(None), 23, 2, 1, 4, False)
    tokens = 1e2 * k, v
    sink = jnp.asarray([1e6, -1e6])
    for form in FORMS.values():
        out = joint_attention(1e4 * q, None, tokens, ExactBranch(None), sink, **form)
        expected, _ = attention(Geometry(None), 1e4 * q, None, tokens, sink)
        np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def test_an_implementation_that_does_not_exist_is_refused():
    (q, _, tokens, _), _ = draw(Geometry(None), 5, 2, 1, 4, False)
    with pytest.raises(NotImplementedError, match="no implementation 'cuda'"):
        joint_attention(q, None, tokens, ExactBranch(None), implementation="cuda")
