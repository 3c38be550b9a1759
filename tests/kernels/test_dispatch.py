"""Which form of a kernel runs."""

import json

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import dispatch, request
from pallas_kernels.dispatch import Form, choose, default


def chosen(implementation=None, why_not=None):
    return choose("kernel", implementation, "kind", jnp.bfloat16, lambda form: why_not)


@pytest.fixture
def table(monkeypatch, tmp_path):
    """A table of defaults in which TPUs run Pallas for kernel, kind and bfloat16."""
    row = {"kernel": "kernel", "platform": "tpu", "kind": "kind", "dtype": "bfloat16", "default": "pallas"}
    path = tmp_path / "defaults.json"
    path.write_text(json.dumps([row]))
    monkeypatch.setattr(dispatch, "DEFAULTS", path)
    dispatch._defaults.cache_clear()
    yield
    dispatch._defaults.cache_clear()


def test_without_a_row_the_default_is_xla():
    for platform in ("cpu", "gpu", "tpu"):
        with request(platform=platform):
            assert chosen() == Form("xla")


def test_a_row_makes_the_default(table):
    assert default("kernel", "tpu", "kind", "bfloat16") == "pallas"
    assert default("kernel", "tpu", "kind", "float32") == default("kernel", "gpu", "kind", "bfloat16") == "xla"
    with request(platform="tpu"):
        assert chosen() == Form("tpu")
        assert chosen("xla") == Form("xla")
        assert chosen(why_not="too wide") == Form("xla")
    assert chosen() == Form("xla")


def test_what_was_asked_for_by_name_and_cannot_be_is_an_error():
    with pytest.raises(NotImplementedError, match="kernel on cpu: CPUs run the reference"):
        chosen("pallas")
    with request(platform="gpu"), pytest.raises(NotImplementedError, match="kernel on gpu: too wide"):
        chosen("pallas", "too wide")
    with request("pallas", "tpu"), pytest.raises(NotImplementedError, match="kernel on tpu: too wide"):
        chosen(why_not="too wide")
    with pytest.raises(NotImplementedError, match="kernel has no implementation 'triton'; choose xla or pallas"):
        chosen("triton")


def test_interpreting_runs_the_tpu_form_anywhere():
    with request("pallas", interpret=True):
        assert chosen() == Form("tpu", True)
        assert chosen("xla") == Form("xla")
    with request("pallas", "gpu", interpret=True):
        assert chosen() == Form("gpu", True)


def test_a_request_is_part_of_what_jit_keeps():
    seen = jax.jit(lambda x: x + {"xla": 1, "tpu": 2}[chosen().name])
    assert seen(0) == 1
    with request("pallas", "tpu"):
        assert seen(0) == 2
    assert seen(0) == 1


@pytest.mark.parametrize("asked", [{"implementation": "mosaic"}, {"platform": "cuda"}])
def test_an_unknown_request_is_an_error(asked):
    with pytest.raises(ValueError, match="choose"):
        request(**asked)


def test_a_request_may_mean_some_kernels():
    with request("pallas", "tpu", kernels=("kernel",)):
        assert chosen() == Form("tpu")
    with request("pallas", "tpu", kernels=("another",)):
        assert chosen() == Form("xla")


def test_the_table_holds_on_a_mesh_too(table):
    with dispatch.mesh_axes(("data",), ("tensor",)), request(platform="tpu"):
        assert chosen() == Form("tpu")
        assert chosen("xla") == Form("xla")
