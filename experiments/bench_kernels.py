"""phase-jax bench kernels: each kernel against every way to write it in plain JAX, in one run."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.evaluate import SEED, run_prompts, trained
from experiments.options import parser
from phase_jax.errors import UserError
from phase_jax.run import RunFolder, write_atomically, write_json


def write_defaults(new: list[dict]) -> None:
    """Puts rows into the table of defaults in the place of those of the same platform, kind and dtype."""
    from pallas_kernels.dispatch import DEFAULTS

    def key(row):
        return [row[name] for name in ("kernel", "platform", "kind", "dtype")]

    rows = {tuple(key(row)): row for row in [*json.loads(DEFAULTS.read_text(encoding="utf-8")), *new]}
    ordered = sorted(rows.values(), key=key)
    write_atomically(DEFAULTS, "[\n" + ",\n".join(f" {json.dumps(row)}" for row in ordered) + "\n]\n")


def curve(folder: RunFolder, logical: int) -> Iterator[dict]:
    """The rows of `kernel_curve.compare` on prefix-padded prompts, printed as they come."""
    config = trained(folder)

    from experiments.kernel_curve import compare, line
    from phase_jax.model import Transformer
    from phase_jax.training.loop import load_params

    prompts = run_prompts(config, "prefix", logical, SEED)
    print(f"{config.id}, seed {config.seed}: the TPU forms, interpreted, against plain JAX")
    for row in compare(Transformer(config.model), load_params(config, folder), prompts, config.data.vocabulary):
        print(line(row), flush=True)
        yield row


def main(argv: Sequence[str]) -> int:
    arguments = parser(
        "bench kernels",
        "Time the kernels and their plain forms. On CPUs, which run no Pallas, the plain forms alone, in float32.",
        "phase-jax bench kernels --only 'vector 8/4' --json kernels.json",
    )
    arguments.add_argument("--only", default="", metavar="PATTERN", help="cases whose kernel and name match it")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    arguments.add_argument(
        "--write-defaults", action="store_true", help="make what won the default here: pallas_kernels/defaults.json"
    )
    arguments.add_argument(
        "--curve", type=Path, metavar="RUN", help="time nothing: a trained run's curve by the kernels"
    )
    arguments.add_argument("--logical", type=int, default=24, help="its logical samples (default %(default)s)")
    options = arguments.parse_args(argv)
    if options.curve:
        rows = list(curve(RunFolder(options.curve), options.logical))
        if options.json:
            write_json(options.json, rows)
        return 0

    import jax

    from experiments.kernel_cases import all_cases
    from experiments.kernel_cases.measure import copy_bandwidth, defaults, lines, matmul_rate, measure, ratios
    from experiments.runtime import prepare

    prepare(compilation_cache=False)
    platform = jax.default_backend()
    try:
        cases = [case for case in all_cases() if re.search(options.only, f"{case.kernel}: {case.name}")]
    except re.error as error:
        raise UserError(f"--only {options.only}: no regular expression ({error})") from error
    if platform == "cpu":
        cases = [case for case in cases if case.dtype == "float32"]
    if not cases:
        raise UserError(f"--only {options.only}: no case matches; without it all are measured")
    bandwidth, rate = copy_bandwidth(), matmul_rate()
    machine = jax.devices()[0].device_kind
    print(f"{machine}, jax {jax.__version__}: copies {bandwidth / 1e9:.1f} GB/s, products {rate / 1e12:.2f} Tflop/s")
    if platform == "cpu":
        print("CPUs run the plain forms, so these are compared with one another; no kernel is measured")
    rows: list[dict] = []
    for case in cases:
        new = ratios(list(measure(case, platform != "cpu", jax.random.key(0))))
        for line in list(lines(new, bandwidth, rate))[bool(rows) :]:
            print(line, flush=True)
        rows += new
    if options.json:
        write_json(options.json, {"machine": machine, "bandwidth": bandwidth, "matmul": rate, "rows": rows})
    if options.write_defaults:
        if platform == "cpu":
            raise UserError("--write-defaults on a CPU: there is no kernel to choose, XLA is the default")
        write_defaults(defaults(rows, platform, f"measured on {machine}"))
    return 0
