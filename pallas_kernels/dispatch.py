"""Which form of a kernel runs: the one asked for, or the default of the platform, the kind of call and the dtype.

The defaults are rows of `defaults.json`, made by `phase-jax bench kernels --write-defaults`; where it has none, XLA.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import jax

Implementation = Literal["xla", "pallas"]

DEFAULTS = Path(__file__).with_name("defaults.json")


class Request(NamedTuple):
    """What is asked of calls that do not say it themselves; None leaves it to the defaults and to JAX."""

    implementation: Implementation | None = None
    platform: str | None = None
    interpret: bool = False


class Form(NamedTuple):
    """What runs: `name` is xla, tpu or gpu; `interpret` evaluates a Pallas form with JAX operations, on any machine."""

    name: str
    interpret: bool = False


_context = jax.make_user_context(Request())  # part of the key under which jit keeps what it traced


def request(implementation: Implementation | None = None, platform: str | None = None, interpret: bool = False):
    """Context in which kernels are traced otherwise than by default: every call whose own `implementation` is None.

    `platform` ("tpu", "gpu") is for compiling ahead of time for another machine; `interpret` runs the form of that
    platform (TPUs' where it is None) anywhere, slowly. Raises ValueError for an unknown name.
    """
    if implementation not in (None, "xla", "pallas"):
        raise ValueError(f"implementation '{implementation}': choose xla or pallas, or None for the default")
    if platform not in (None, "cpu", "gpu", "tpu"):
        raise ValueError(f"platform '{platform}': choose cpu, gpu or tpu, or None for this machine's")
    return _context(Request(implementation, platform, interpret))


def choose(
    kernel: str,
    implementation: Implementation | None,
    kind: str,
    dtype,
    unsupported: Callable[[Form], str | None],
) -> Form:
    """The form that a call of `kernel` takes.

    `kind` names the class of calls that the defaults tell apart, `unsupported` says why a Pallas form cannot serve this
    call (None where it can). Raises NotImplementedError with that reason where Pallas was asked for by name.
    """
    if implementation not in (None, "xla", "pallas"):
        raise NotImplementedError(f"{kernel} has no implementation '{implementation}'; choose xla or pallas")
    asked = _context.value
    platform = asked.platform or ("tpu" if asked.interpret else _computing_platform())
    wanted = implementation or asked.implementation
    if (wanted or default(kernel, platform, kind, dtype)) == "xla":
        return Form("xla")
    form = Form(platform, asked.interpret)
    why_not = "CPUs run the reference; a Pallas form can only be interpreted there" if platform == "cpu" else None
    why_not = why_not or unsupported(form)
    if why_not is None:
        return form
    if wanted:
        raise NotImplementedError(f"{kernel} on {platform}: {why_not}")
    return Form("xla")


def default(kernel: str, platform: str, kind: str, dtype) -> Implementation:
    """The implementation that `defaults.json` names; xla where it names none."""
    return _defaults().get((kernel, platform, kind, jax.numpy.dtype(dtype).name), "xla")


@functools.cache
def _defaults() -> dict[tuple[str, str, str, str], Implementation]:
    rows = json.loads(DEFAULTS.read_text(encoding="utf-8"))
    return {(row["kernel"], row["platform"], row["kind"], row["dtype"]): row["default"] for row in rows}


def _computing_platform() -> str:
    device = jax.config.jax_default_device
    name = getattr(device, "platform", device) or jax.default_backend()
    return {"cuda": "gpu", "rocm": "gpu"}.get(name, name)
