"""Every form of joint attention against a float64 loop, in values and in gradients; and what its kernel visits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from pallas_kernels import request
from pallas_kernels.joint_attention import joint_attention, tpu
from pallas_kernels.joint_attention.layout import Layout
from pallas_kernels.traffic import traffic
from phase_jax.geometry import ExactBranch, Windows
from tests.kernels.attention_loop import Geometry, attention

# Those that run everywhere; GPUs' takes fewer dtypes and heads, and its interpreter a minute.
FORMS = ("dense", "blockwise", "tpu")
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


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


def attend(form: str, inputs, exact: ExactBranch):
    q, entries, tokens, sink = inputs
    kernel = form in ("tpu", "gpu")
    with request("pallas" if kernel else "xla", form if kernel else None, interpret=kernel):
        return joint_attention(q, entries, tokens, exact, sink, 48 if form == "blockwise" else None)


def assert_equals_the_loop(form: str, geometry: Geometry, inputs, cotangent):
    """Values and gradients, relative to the largest of each."""
    exact, dtype = branch_of(geometry), str(cotangent.dtype)

    @jax.jit
    def values_and_gradients(inputs):
        out, back = jax.vjp(lambda *inputs: attend(form, inputs, exact), *inputs)
        return out, back(cotangent)

    out, (dq, dentries, dtokens, dsink) = values_and_gradients(inputs)
    expected, gradients = attention(geometry, *inputs, cotangent)
    found = (out, dq, *(dentries or (None, None)), *dtokens, dsink)
    for name, ours, theirs in zip("out q entry_k entry_v k v sink".split(), found, (expected, *gradients), strict=True):
        if ours is not None and ours.size:
            error = np.abs(np.asarray(ours, np.float64) - theirs).max() / max(1, np.abs(theirs).max())
            assert error < TOLERANCE[dtype], f"{name}: {error}"


CASES = {
    # geometry, T, N, K, H, sink, dtype: every geometry, rule, dtype and kind of heads, and T a multiple of nothing
    "4/4": (Geometry(4, 4), 61, 4, 2, 16, False, "float32"),
    "8/4 half-empty": (Geometry(8, 4, -4), 131, 2, 1, 8, True, "float32"),
    "8/6 narrow": (Geometry(8, 6, -2, "window", 5), 150, 4, 2, 8, False, "float32"),
    "8/8": (Geometry(8, 8), 3, 2, 2, 8, True, "float32"),
    "12/12 tail": (Geometry(12, 12, 0, "tail"), 97, 4, 1, 16, True, "bfloat16"),
    "5/3 none": (Geometry(5, 3, 0, "none"), 77, 4, 4, 8, False, "float32"),
    "16/8 tail": (Geometry(16, 8, -3, "tail"), 201, 2, 1, 8, False, "float32"),
    "128/128": (Geometry(128, 128, 0, "window", 127), 300, 2, 1, 16, False, "bfloat16"),
    "full": (Geometry(None), 143, 4, 2, 16, True, "float32"),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_equals_the_loop(form, case):
    geometry, *shape = CASES[case]
    assert_equals_the_loop(form, geometry, *draw(geometry, *shape))


@st.composite
def any_call(draw_from):
    """A geometry and the arguments of `draw`."""
    width = draw_from(st.integers(1, 20))
    stride = draw_from(st.integers(1, width))
    origin = -draw_from(st.integers(0, width - 1))
    rule = draw_from(st.sampled_from(["window", "tail", "none"]))
    kv_heads, head_dim = draw_from(st.sampled_from([1, 2, 3])), draw_from(st.sampled_from([1, 8, 20]))
    heads = kv_heads * draw_from(st.integers(1, 3))
    dtype, length = draw_from(st.sampled_from(list(TOLERANCE))), draw_from(st.integers(1, 270))
    geometry = Geometry(
        width, stride, origin, rule, max(stride - 1, width + origin - 1, 1) + draw_from(st.integers(0, 9))
    )
    return geometry, (length, heads, kv_heads, head_dim, draw_from(st.booleans()), dtype)


@settings(max_examples=5, deadline=None, derandomize=True)
@given(any_call())
def test_equals_the_loop_whatever_the_call(call):
    geometry, shape = call
    assert_equals_the_loop("tpu", geometry, *draw(geometry, *shape))


@pytest.mark.parametrize("form", FORMS)
def test_scores_of_any_size_neither_overflow_nor_vanish(form):
    (q, _, (k, v), _), _ = draw(Geometry(None), 23, 2, 1, 4, False)
    sink = jnp.asarray([1e6, -1e6])
    out = attend(form, (1e4 * q, None, (1e2 * k, v), sink), ExactBranch(None))
    expected, _ = attention(Geometry(None), 1e4 * q, None, (1e2 * k, v), sink)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def visited(layout: Layout):
    """Which blocks [of queries, of keys] the kernel visits, forward, for queries' gradients and for keys'."""
    forward, queries, keys = tpu.mask_infos(layout)
    for info, of_keys in ((forward, False), (queries, False), (keys, True)):
        blocks = np.zeros((layout.queries // layout.rows, layout.keys // layout.columns), int)
        _, row, column = np.nonzero(info.block_mask)
        other = info.data_next[info.block_mask > 0]
        np.add.at(blocks, (other, column) if of_keys else (row, other), 1)
        assert blocks.max() == 1, "a block is visited twice"
        yield blocks


@pytest.mark.parametrize("case", ["8/4 half-empty", "16/8 tail", "5/3 none", "full"])
def test_the_kernel_visits_the_blocks_that_hold_something_seen_and_no_other(case):
    layout = tpu.layout_of(branch_of(CASES[case][0]), 3_000)
    seen = layout.seen(np.arange(3_000)[:, None], np.arange(layout.keys))
    seen = np.pad(np.asarray(seen), [(0, layout.queries - 3_000), (0, 0)])
    expected = seen.reshape(layout.queries // layout.rows, layout.rows, -1, layout.columns).any(axis=(1, 3))
    assert 0 < expected.sum() < expected.size
    for blocks in visited(layout):
        np.testing.assert_array_equal(blocks, expected)


def test_about_half_of_the_rectangle_is_visited_at_131072_tokens():
    layout = tpu.layout_of(ExactBranch(Windows(8, 8), "window", 16), 131_072)
    for blocks in visited(layout):
        rectangle, band = np.split(blocks, [layout.entries // layout.columns], axis=1)
        assert 0.5 <= rectangle.mean() <= 0.55
        assert band.sum(axis=1).max() <= 2


def test_the_products_of_visited_blocks_are_counted_and_no_others():
    """Two a block forward, three for the gradient of queries and four for that of keys, whose grid has empty steps."""
    batch, length, heads, head_dim, exact = 2, 2_000, 4, 128, ExactBranch(Windows(8, 8), "window", 16)
    shapes = [(batch, length, heads, head_dim)] + [(batch, 250, 1, head_dim)] * 2 + [(batch, length, 1, head_dim)] * 2
    calls = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def gradients(cotangent, *x):
        return jax.vjp(lambda *x: joint_attention(x[0], x[1:3], x[3:], exact), *x)[1](cotangent)

    with request("pallas", platform="tpu"):
        counted = [call.flops for call in traffic(gradients, calls[0], *calls)]
    layout = tpu.layout_of(exact, length)
    product = 2 * layout.visited().sum() * layout.rows * layout.columns * head_dim * heads * batch
    assert sorted(counted) == [n * product for n in (2, 3, 4)]


def lowered(form: str, geometry: Geometry, *shape) -> str:
    """What the call and its gradient become on a platform that is not here."""
    exact, (inputs, cotangent) = branch_of(geometry), jax.eval_shape(lambda: draw(geometry, *shape))

    def gradients(inputs, cotangent):
        with request("pallas", platform=form):
            return jax.vjp(lambda *inputs: joint_attention(*inputs[:3], exact, inputs[3]), *inputs)[1](cotangent)

    platform = {"tpu": "tpu", "gpu": "cuda"}[form]
    return jax.jit(gradients).trace(inputs, cotangent).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("case", ["8/4 half-empty", "12/12 tail", "5/3 none", "full"])
def test_lowers_for_tpus_with_its_gradient(case):
    assert lowered("tpu", *CASES[case]).count("custom_call @tpu_custom_call") == 3


GPU_CASES = {
    "8/6": (Geometry(8, 6, -2, "window", 9), 100, 4, 2, 64, True, "bfloat16"),
    "12/12 tail": (Geometry(12, 12, 0, "tail"), 97, 2, 1, 128, False, "bfloat16"),
    "5/3 none": (Geometry(5, 3, 0, "none"), 130, 2, 2, 64, True, "bfloat16"),
    "full": (Geometry(None), 143, 2, 1, 128, True, "bfloat16"),
}


@pytest.mark.parametrize("case", GPU_CASES)
def test_lowers_for_gpus_with_its_gradient(case):
    assert lowered("gpu", *GPU_CASES[case]).count("custom_call @mosaic_gpu_v2") == 3


@pytest.mark.slow
@pytest.mark.parametrize("case", ["8/6", "12/12 tail"])
def test_the_form_for_gpus_equals_the_loop(case):
    geometry, *shape = GPU_CASES[case]
    assert_equals_the_loop("gpu", geometry, *draw(geometry, *shape))


def test_what_cannot_be_served_says_why():
    (q, _, tokens, _), _ = draw(Geometry(None), 5, 2, 1, 4, False)
    call = (q, None, tokens, ExactBranch(None))
    with pytest.raises(NotImplementedError, match="no implementation 'cuda'"):
        joint_attention(*call, implementation="cuda")
    with pytest.raises(NotImplementedError, match="CPUs run the reference"):
        joint_attention(*call, implementation="pallas")
    with request("pallas", platform="tpu"), pytest.raises(NotImplementedError, match="float16 queries"):
        joint_attention(q.astype(jnp.float16), *call[1:])
    with request("pallas", platform="gpu"):
        with pytest.raises(NotImplementedError, match="float32 queries"):
            joint_attention(*call)
        with pytest.raises(NotImplementedError, match="heads of 4 channels"):
            joint_attention(q.astype(jnp.bfloat16), *call[1:])


def test_the_error_of_the_kernel_knows_no_phase():
    geometry = Geometry(8, 8)
    inputs, _ = draw(geometry, 288, 4, 1, 16, False)
    expected, _ = attention(geometry, *inputs)
    error = np.abs(np.asarray(attend("tpu", inputs, branch_of(geometry)), np.float64) - expected)[:, 32:]
    by_phase = np.sqrt((error.reshape(2, -1, 8, error[0, 0].size) ** 2).mean(axis=(0, 1, 3)))
    assert by_phase.max() < 1.3 * by_phase.min()


def test_runs_under_jit_scan_remat_vmap_and_shard_map():
    exact = ExactBranch(Windows(4, 2))
    (q, entries, tokens, _), cotangent = draw(Geometry(4, 2), 21, 2, 1, 8, False)
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    queries, keys = PartitionSpec("data", None, "tensor"), PartitionSpec("data")

    def layers(form):
        @jax.checkpoint
        def layer(q, entries_and_tokens):
            one = jax.vmap(lambda q, *rest: attend(form, jax.tree.map(lambda x: x[None], (q, *rest, None)), exact)[0])
            return one(q, *entries_and_tokens), None

        return jax.shard_map(
            lambda q, *rest: jax.lax.scan(layer, q, jax.tree.map(lambda x: jnp.stack([x, -x]), rest))[0],
            mesh=mesh,
            in_specs=(queries, keys, keys),
            out_specs=queries,
            check_vma=False,
        )

    def gradients(form):
        return jax.vjp(layers(form), q, entries, tokens)[1](cotangent)

    ours, theirs = jax.jit(lambda: (gradients("tpu"), gradients("dense")))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, theirs)


@pytest.mark.parametrize("case", ["8/4 half-empty", "5/3 none", "full"])
def test_the_bytes_moved_are_those_of_the_blocks_visited(case):
    exact, length, heads, kv_heads, head_dim = branch_of(CASES[case][0]), 3_000, 4, 2, 128
    layout = tpu.layout_of(exact, length)
    q = jax.ShapeDtypeStruct((1, length, heads, head_dim), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, length, kv_heads, head_dim), jnp.bfloat16)
    count = exact.windows.count(length) if exact.windows else 0
    entry = [jax.ShapeDtypeStruct((1, count, kv_heads, head_dim), jnp.bfloat16)] if count else []
    with request("pallas", "tpu"):
        (call,) = traffic(lambda q, k, *e: joint_attention(q, (*e, *e) or None, (k, k), exact), q, k, *entry)
    fetched, before = 0, None
    for head in range(heads):
        for row in layout.visited():
            for column in np.flatnonzero(row):
                here = head // (heads // kv_heads), column
                fetched += here != before
                before = here
    item = 2 * head_dim
    least = item * (heads * layout.queries + 2 * fetched * layout.columns)
    positions = 4 * 128 * heads * layout.queries  # those of queries, as the kernel wants them
    working = 4 * layout.rows * (2 * 128 + head_dim)  # once: it declares its working memory as outputs
    assert call.written == item * heads * layout.queries + working
    assert least <= call.read <= least + positions + 10_000
