"""Tests run on the CPU, and compile fast rather than well: most of their time would go into XLA's optimisations.

What is compiled is kept until the tests are over, for every worker and for the processes that tests start.
"""

import atexit
import os
import shutil
import tempfile
from importlib.metadata import version

os.environ.setdefault("JAX_PLATFORMS", "cpu")
flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
if version("jax").startswith("0.10."):  # as in experiments/runtime.py
    flags += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", flags)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # workers get it from the process that starts them
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="phase-jax-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
