"""What the cases cost on this machine, against what it can do; needs JAX and numpy only."""

import statistics
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from experiments.hlo import bytes_moved
from experiments.kernel_cases import Case, with_gradients
from pallas_kernels.traffic import total_bytes, traffic

FORWARD, BACKWARD = "forward", "forward + backward"


def seconds(function: Callable, *arguments, repeats: int = 5, least: float = 0.05) -> float:
    """Median time of a call, its compilation apart; calls are queued, so that the time of starting one is hidden."""
    run = jax.jit(function)
    jax.block_until_ready(run(*arguments))
    began = time.perf_counter()
    jax.block_until_ready(run(*arguments))
    calls = max(1, min(100, int(least / (time.perf_counter() - began))))

    def once() -> float:
        began = time.perf_counter()
        for _ in range(calls):
            out = run(*arguments)
        jax.block_until_ready(out)
        return (time.perf_counter() - began) / calls

    return statistics.median(once() for _ in range(repeats))


def copy_bandwidth() -> float:
    """Bytes read and written a second by an element-wise pass over an array beyond every cache."""
    x = jax.random.normal(jax.random.key(0), ((2**22 if jax.default_backend() == "cpu" else 2**28),), jnp.float32)
    return 2 * x.nbytes / seconds(lambda x: x + 1, x)


def matmul_rate() -> float:
    """Operations a second of a large matrix product: bf16, f32 on CPUs."""
    n, dtype = (1024, jnp.float32) if jax.default_backend() == "cpu" else (8192, jnp.bfloat16)
    x, y = (jax.random.normal(key, (n, n), dtype) for key in jax.random.split(jax.random.key(0)))
    return 2 * n**3 / seconds(jnp.matmul, x, y)


def passes(case: Case) -> tuple[str, ...]:
    """Forward and, where the case has gradients, forward with backward."""
    return (FORWARD, BACKWARD) if case.gradients else (FORWARD,)


def function_of(case: Case, pass_: str, form: Callable) -> Callable:
    """What a pass computes by a form of the case, a function of `draw(case, pass_, key)`."""
    return form if pass_ == FORWARD else with_gradients(form, case.gradients)


def draw(case: Case, pass_: str, key: jax.Array) -> tuple:
    """Random arguments, a cotangent of the output before them in the backward pass."""
    arguments = case.arguments(key)
    if pass_ == FORWARD:
        return arguments
    out = jax.eval_shape(next(iter(case.xla.values())), *arguments)
    return jax.random.normal(jax.random.fold_in(key, 1), out.shape, out.dtype), *arguments


def least(case: Case, pass_: str) -> dict[str, float]:
    """The bytes that any form must move, and the operations of its matrix products."""
    if pass_ == FORWARD:
        return {"bytes_least": case.bytes_least, "flops": case.flops}
    return {"bytes_least": case.bytes_least_grad, "flops": case.flops_grad}


def errors(case: Case, key: jax.Array) -> dict[str, float]:
    """‖kernel − reference‖ / ‖reference‖ of each output on fresh random inputs, the reference in f32."""
    reference = next(iter(case.xla.values()))
    pass_ = passes(case)[-1]
    arguments = draw(case, pass_, key)
    got = jax.jit(function_of(case, pass_, case.pallas))(*arguments)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, arguments)
    with jax.default_matmul_precision("highest"):
        want = jax.jit(function_of(case, pass_, reference))(*wide)

    def error(got, want):
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        return float(np.linalg.norm(got - want) / np.linalg.norm(want))

    leaves = jax.tree.leaves(jax.tree.map(error, got, want))
    return dict(zip(["output", *(f"gradient {n}" for n in case.gradients)], leaves, strict=True))


def measure(case: Case, with_pallas: bool, key: jax.Array) -> Iterator[dict]:
    """A row for each pass and form: seconds, and bytes as the compiled program and kernels' block specs have them.

    A form that this machine cannot run has its reason under `failed`.
    """
    peers = case.peers if jax.default_backend() == "gpu" else {}
    forms = {**case.xla, **peers, **({"pallas": case.pallas} if with_pallas else {})}
    for pass_ in passes(case):
        arguments = draw(case, pass_, key)
        for form, plain in forms.items():
            function = function_of(case, pass_, plain)
            row = {"kernel": case.kernel, "case": case.name, "kind": case.kind, "dtype": case.dtype}
            row |= {"pass": pass_, "form": form, "peer": form in peers, **least(case, pass_)}
            try:
                row["seconds"] = seconds(function, *arguments)
                row["bytes"] = _bytes(function, arguments)
            except Exception as error:  # whatever a compiler or a driver raises is a finding, and the rest goes on
                row["failed"] = (str(error).splitlines() or [type(error).__name__])[0][:200]
            yield row


def _bytes(function: Callable, arguments: tuple) -> float | None:
    """What the compiled program moves, and the blocks of its kernels; None where one cannot be counted."""
    compiled = jax.jit(function).lower(*arguments).compile()
    try:
        return bytes_moved(compiled) + total_bytes(traffic(function, *arguments))
    except (NotImplementedError, ValueError):
        return None


def ratios(rows: list[dict]) -> list[dict]:
    """The rows with `ratio`: the best plain form's time over the row's, above 1 where a kernel beats them all; and with
    `ratio_to_peer`, where one was timed, the best peer's over the row's."""

    def with_best(row):
        same = [r for r in rows if "seconds" in r and all(r[k] == row[k] for k in ("kernel", "case", "pass"))]
        plain = [r["seconds"] for r in same if r["form"] != "pallas" and not r["peer"]]
        peers = [r["seconds"] for r in same if r["peer"]]
        found = {"ratio": plain, "ratio_to_peer": peers} if "seconds" in row else {}
        return row | {name: min(times) / row["seconds"] for name, times in found.items() if times}

    return [with_best(row) for row in rows]


def lines(rows: list[dict], bandwidth: float, rate: float) -> Iterator[str]:
    """The rows as a table: `reached` is the time that the least bytes or the operations take at full speed."""
    peers = any("ratio_to_peer" in row for row in rows)
    yield f"{'':4}{'form':<20}{'ms':>9}{'MB':>9}{'reached':>9}{'ratio':>7}" + f"{'to peer':>9}" * peers
    heading = None
    for row in rows:
        if (row["case"], row["pass"]) != heading:
            heading = row["case"], row["pass"]
            yield f"{row['kernel']}: {row['case']}, {row['pass']}"
        if "failed" in row:
            yield f"{'':4}{row['form']:<20} {row['failed']}"
            continue
        full = max(row["bytes_least"] / bandwidth, row["flops"] / rate)
        counted = f"{row['bytes'] / 1e6:.0f}" if row["bytes"] else "–"
        ratio, to_peer = (f"{row[name]:.2f}" if name in row else "–" for name in ("ratio", "ratio_to_peer"))
        yield (
            f"{'':4}{row['form']:<20}{1e3 * row['seconds']:>9.2f}{counted:>9}{full / row['seconds']:>9.0%}{ratio:>7}"
            + f"{to_peer:>9}" * peers
        )


def defaults(rows: list[dict], platform: str, basis: str, cost: str = "seconds") -> list[dict]:
    """Rows for the table of defaults: Pallas where it beats the best plain form in every case and pass of a kind."""
    grouped: dict[tuple, list[float]] = {}
    for kernel, case, pass_ in dict.fromkeys((row["kernel"], row["case"], row["pass"]) for row in rows):
        own = [r for r in rows if (r["kernel"], r["case"], r["pass"]) == (kernel, case, pass_)]
        plain = [r[cost] for r in own if r["form"] != "pallas" and not r.get("peer") and r.get(cost)]
        pallas = [r[cost] for r in own if r["form"] == "pallas" and r.get(cost)]
        gain = min(plain) / pallas[0] if plain and pallas else 0.0
        grouped.setdefault((kernel, own[0]["kind"], own[0]["dtype"]), []).append(gain)
    return [
        {
            **{"kernel": kernel, "platform": platform, "kind": kind, "dtype": dtype},
            **{"default": "pallas" if min(gains) > 1 else "xla", "least_gain": round(min(gains), 3), "basis": basis},
        }
        for (kernel, kind, dtype), gains in grouped.items()
    ]
