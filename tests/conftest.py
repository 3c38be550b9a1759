"""Tests run on the CPU, with each worker on one thread, so that two workers share two cores."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
