"""Compiled programs are kept between the runs of these tests, since each run builds its step anew."""

import jax
import pytest


@pytest.fixture(scope="package", autouse=True)
def _compilation_cache(tmp_path_factory):
    before = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    yield
    jax.config.update("jax_compilation_cache_dir", before[0])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])
