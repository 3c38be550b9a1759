"""The cases that are compiled, checked and timed: competitors compute what the kernels do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.kernel_cases import all_cases, joint_attention, windowed_gating
from experiments.kernel_cases.measure import draw, function_of, passes
from pallas_kernels.windowed_gating import windowed_gating as ours
from phase_jax.geometry import Windows


@pytest.mark.parametrize("form", [windowed_gating.gather, windowed_gating.shifted_slices, windowed_gating.chunk_view])
def test_forms_of_windowed_gating_agree(form):
    for windows, streams, gates in ((Windows(8, 4, -3), 2, 8), (Windows(5, 3), 1, 1), (Windows(6, 6, -2), 1, 8)):
        rng = np.random.default_rng(0)
        sizes = [(2, 31, streams, 2, 8), (2, 31, streams, 2, gates), (windows.width, 2, gates)]
        arguments = [jnp.asarray(rng.normal(size=size), jnp.float32) for size in sizes]
        np.testing.assert_allclose(form(*arguments, windows), ours(*arguments, windows), atol=1e-5)


def test_names_are_unique_and_least_bytes_are_known():
    cases = all_cases()
    assert len({(case.kernel, case.name) for case in cases}) == len(cases)
    assert all(case.bytes_least > 0 or case.flops > 0 for case in cases)


@pytest.mark.parametrize("case", [case for case in joint_attention.CASES if case.peers], ids=lambda case: case.name)
def test_cudnns_attention_lowers_for_gpus(case, monkeypatch):
    """Without a GPU jax would refuse, since it finds no cuDNN; its own calls are in what is lowered."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    for pass_ in passes(case):
        arguments = jax.eval_shape(lambda key, p=pass_: draw(case, p, key), jax.random.key(0))
        for peer in case.peers.values():
            traced = jax.jit(function_of(case, pass_, peer)).trace(*arguments)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
            assert "__cudnn$fmhaSoftmax" in text
            assert ("__cudnn$fmhaSoftmaxBackward" in text) == (pass_ == "forward + backward")
