"""What every verb that computes sets up: the compilation cache and, on request, a profile."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax


def prepare() -> None:
    """Keeps compiled programs between commands, in $JAX_COMPILATION_CACHE_DIR or ~/.cache/phase-jax."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(Path.home() / ".cache" / "phase-jax"))


@contextmanager
def profiled(folder: Path | None) -> Iterator[None]:
    """Traces what runs inside into `folder`; nothing where it is None."""
    if folder is None:
        yield
        return
    with jax.profiler.trace(str(folder)):
        yield
