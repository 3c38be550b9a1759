"""What every verb that computes sets up: memory, the compilation cache and, on request, a profile."""

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

# Parameters of glibc's mallopt, from malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8

# XLA's older code generator for fusions on CPUs: a training step of the lab takes 10 to 15 % less time. jax 0.11 has it
# no more, and a flag that XLA does not know ends the process.
_FUSIONS = "--xla_cpu_use_fusion_emitters"


def prepare(compilation_cache: bool = True) -> None:
    """Sets up a process that computes, before jax's first computation in it.

    Compiled programs are kept between commands, in $JAX_COMPILATION_CACHE_DIR or ~/.cache/phase-jax. On Linux freed
    memory stays with the process, all of it (a trim threshold of -1), in one arena (others map what is larger than
    64 MiB): XLA's CPU backend allocates its buffers anew in every call, and taking their pages from the kernel each
    time was up to 40 % of a training step. A choice of fusions' code generator in $XLA_FLAGS stands.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if jax.__version_info__ < (0, 11) and _FUSIONS not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_FUSIONS}=false"
    if compilation_cache and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(Path.home() / ".cache" / "phase-jax"))
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
        for parameter, value in ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, 2**26)):
            if mallopt is not None:
                mallopt(parameter, value)


@contextmanager
def profiled(folder: Path | None) -> Iterator[None]:
    """Traces what runs inside into `folder`; nothing where it is None."""
    if folder is None:
        yield
        return
    with jax.profiler.trace(str(folder)):
        yield
