"""phase-jax bench longcontext: time and peak memory against the length of the context.

Every row is measured in a process of its own, so that a peak is that row's alone. On CPUs the peak is the process's
largest resident memory, the program included; on accelerators, of the device.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from configs.family import FAMILY, model_config
from experiments.options import parser
from phase_jax.errors import UserError
from phase_jax.run import write_json
from phase_jax.suggest import unknown

MODELS = ("kvc_w8s8_1kv_baseline", "full_attn_1kv")
LENGTHS = (8_000, 16_000, 32_000, 64_000, 128_000)
BLOCK = 256


def measure(variant: str, length: int, block: int) -> dict:
    """One forward pass to the last position's logits, compiled before: seconds, and bytes at the peak and before."""
    import resource

    import jax
    import jax.numpy as jnp

    from experiments.runtime import prepare
    from phase_jax.model import Transformer

    prepare(compilation_cache=False)

    def peak() -> int:
        device = jax.devices()[0].memory_stats()
        unit = 1 if sys.platform == "darwin" else 1024
        return device["peak_bytes_in_use"] if device else unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    config = dataclasses.replace(model_config(variant, "lab"), attention_block=block)
    model = Transformer(config)
    params = model.init(jax.random.key(0), jnp.zeros((1, 2 * (config.window or 1)), jnp.int32))
    tokens = jax.random.randint(jax.random.key(1), (1, length), 0, config.vocabulary)
    run = jax.jit(lambda params, tokens: model.apply(params, tokens, last_only=True)).lower(params, tokens).compile()
    before, began = peak(), time.perf_counter()
    run(params, tokens).block_until_ready()
    seconds = time.perf_counter() - began
    return {"model": variant, "T": length, "seconds": seconds, "peak_bytes": peak(), "bytes_before": before}


def exponent(lengths: Sequence[int], costs: Sequence[float]) -> float | None:
    """Slope of log cost against log length by least squares; None with fewer than two costs above 0."""
    lengths, costs = np.array(lengths, float), np.array(costs, float)
    known = costs > 0
    return float(np.polyfit(np.log(lengths[known]), np.log(costs[known]), 1)[0]) if known.sum() > 1 else None


def summary(rows: Sequence[dict]) -> dict:
    """Fitted exponents of every model (memory: of what the pass adds), and the last model's cost over the first's."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    own = {variant: [row for row in rows if row["model"] == variant] for variant in models}
    exponents = {
        variant: {
            "seconds": exponent([r["T"] for r in mine], [r["seconds"] for r in mine]),
            "added_bytes": exponent([r["T"] for r in mine], [r["peak_bytes"] - r["bytes_before"] for r in mine]),
        }
        for variant, mine in own.items()
    }
    first, last = own[models[0]][-1], own[models[-1]][-1]
    ratio = {name: last[name] / first[name] for name in ("seconds", "peak_bytes")}
    return {
        "rows": list(rows),
        "exponents": exponents,
        "ratio": {"of": [last["model"], first["model"]], "T": first["T"], **ratio},
    }


def in_a_process(variant: str, length: int, block: int) -> dict:
    """`measure` in a fresh interpreter. Raises UserError where it fails, with the last line it said."""
    command = [sys.executable, "-m", "experiments.bench_longcontext", "--row", variant, str(length), str(block)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}; too little memory?"])[-1]
        raise UserError(f"{variant} at {length} tokens failed: {said}")
    return json.loads(done.stdout.splitlines()[-1])


def main(argv: Sequence[str]) -> int:
    arguments = parser(
        "bench longcontext",
        "Time and peak memory of the lab's models against the length of the context, blockwise.",
        "phase-jax bench longcontext --lengths 8000 16000 --json long.json",
    )
    arguments.add_argument("--models", nargs="+", default=MODELS, metavar="ID", help="ids of phase-jax configs")
    arguments.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="T", help="tokens")
    arguments.add_argument("--block", type=int, default=BLOCK, help="model.attention_block (default %(default)s)")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    arguments.add_argument("--row", nargs=3, metavar=("ID", "T", "BLOCK"), help=argparse.SUPPRESS)
    options = arguments.parse_args(argv)
    if options.row:
        print(json.dumps(measure(options.row[0], int(options.row[1]), int(options.row[2]))))
        return 0
    for variant in options.models:
        if variant not in FAMILY:
            raise UserError(unknown("model id", variant, FAMILY, "phase-jax configs lists them"))
    if min(*options.lengths, options.block) < 1:
        raise UserError("--lengths and --block take numbers from 1 on")
    rows = []
    print(f"{'model':<24}{'T':>8}{'seconds':>10}{'peak MiB':>10}")
    for variant in options.models:
        for length in sorted(options.lengths):
            row = in_a_process(variant, length, options.block)
            print(f"{variant:<24}{length:>8}{row['seconds']:>10.2f}{row['peak_bytes'] / 2**20:>10.0f}", flush=True)
            rows.append(row)
    result = summary(rows)
    for variant, fitted in result["exponents"].items():
        said = ", ".join(f"{name} ~ T^{'?' if e is None else f'{e:.2f}'}" for name, e in fitted.items())
        print(f"{variant}: {said}")
    ratio = result["ratio"]
    print(
        f"{' / '.join(ratio['of'])} at {ratio['T']}: {ratio['seconds']:.2f} of the time,"
        f" {ratio['peak_bytes']:.2f} of the memory"
    )
    if options.json:
        write_json(options.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
