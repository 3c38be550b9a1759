"""Compiles the kernels for TPUs on a machine without one: `make aot`. Needs the extra `tpu` (libtpu).

Prints, for each case, pass and chip, the bytes that the kernel's blocks move and those that XLA adds around it, their
ratio to the least, and the VMEM that the compiler gave the kernel.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.hlo import bytes_moved, kernels_vmem
from experiments.topology import prepare, topology_devices
from phase_jax.errors import UserError

# Chips by the topology of the smallest slice that libtpu describes.
CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
VMEM_LIMIT = 16 * 2**20  # what the compiler grants a kernel on v5e
SLOW_BACKWARD = {"shifted slices"}  # minutes to compile, and never the fewest bytes


class Compiled(NamedTuple):
    """What the compiler said of one function: bytes that XLA's own operations move, VMEM of its largest kernel."""

    added_bytes: float
    vmem: int
    seconds: float


def compile_for(chip: str, function: Callable, *arguments) -> Compiled:
    """Compiles for one device of a chip; arguments are arrays or shapes, in whatever layout suits it."""
    import jax
    from jax.experimental.layout import Format, Layout
    from jax.sharding import SingleDeviceSharding

    from pallas_kernels import request

    device = topology_devices(CHIPS[chip])[0]
    anywhere = Format(Layout.AUTO, SingleDeviceSharding(device))
    began = time.perf_counter()
    with request(platform="tpu"):
        traced = jax.jit(function, in_shardings=anywhere, out_shardings=anywhere).trace(*arguments)
        compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    return Compiled(bytes_moved(compiled), kernels_vmem(compiled.as_text()), time.perf_counter() - began)


def rows(case, chips: Sequence[str], plain: bool) -> Iterator[dict]:
    """A row for each chip, pass and form: Pallas, and with `plain` those of XLA. What does not compile is an error."""
    import jax

    from experiments.kernel_cases.measure import BACKWARD, draw, function_of, least, passes
    from pallas_kernels import request
    from pallas_kernels.traffic import total_bytes, traffic

    for pass_ in passes(case):
        arguments = jax.eval_shape(lambda key, p=pass_: draw(case, p, key), jax.random.key(0))
        for form, function in {"pallas": case.pallas, **(case.xla if plain else {})}.items():
            if pass_ == BACKWARD and form in SLOW_BACKWARD:
                continue
            function = function_of(case, pass_, function)
            with request(platform="tpu"):
                moved = total_bytes(traffic(function, *arguments))
            for chip in chips:
                compiled = compile_for(chip, function, *arguments)
                yield {
                    **{"kernel": case.kernel, "case": case.name, "kind": case.kind, "dtype": case.dtype},
                    **{"chip": chip, "pass": pass_, "form": form, **least(case, pass_)},
                    **{"bytes_blocks": moved, "bytes_added": compiled.added_bytes, "vmem": compiled.vmem},
                    **{"bytes": moved + compiled.added_bytes, "seconds": compiled.seconds},
                }


def line(row: dict) -> str:
    """A row of the table."""
    blocks, added, least = (row[name] / 1e6 for name in ("bytes_blocks", "bytes_added", "bytes_least"))
    return (
        f"{row['chip']:<7}{row['pass']:<20}{row['form']:<18}{blocks:>9.1f}{added:>9.1f}{least:>9.1f}"
        f"{(blocks + added) / least:>7.2f}{row['vmem'] / 2**20:>7.1f}{row['seconds']:>8.1f}"
    )


def main(argv: Sequence[str]) -> int:
    arguments = argparse.ArgumentParser(prog="python -m experiments.aot", description=__doc__.partition("\n")[0])
    arguments.add_argument("--chips", nargs="+", default=list(CHIPS), choices=CHIPS)
    arguments.add_argument("--only", default="", metavar="PATTERN", help="cases whose kernel and name match it")
    arguments.add_argument("--plain", action="store_true", help="compile XLA's forms too: some take a minute")
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    arguments.add_argument(
        "--write-defaults",
        action="store_true",
        help="with --plain: make Pallas the default on TPUs where it moves fewer bytes than every plain form on v5e",
    )
    options = arguments.parse_args(argv)
    prepare()

    from experiments.bench_kernels import write_defaults
    from experiments.kernel_cases import all_cases
    from experiments.kernel_cases.measure import defaults
    from phase_jax.run import write_json

    made = []
    headings = ("blocks MB", 9), ("added", 9), ("least", 9), ("ratio", 7), ("VMEM", 7), ("seconds", 8)
    print(f"{'chip':<7}{'pass':<20}{'form':<18}" + "".join(f"{name:>{width}}" for name, width in headings))
    for case in all_cases():
        if not re.search(options.only, f"{case.kernel}: {case.name}"):
            continue
        print(f"{case.kernel}: {case.name}")
        for row in rows(case, options.chips, options.plain):
            print(line(row), flush=True)
            made.append(row)
    if options.json:
        write_json(options.json, made)
    if options.plain and options.write_defaults:
        v5e = [row for row in made if row["chip"] == "v5e"]
        write_defaults(defaults(v5e, "tpu", "bytes counted for v5e", "bytes"))
    print(f"{len(made)} compiled")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"aot: {error}", file=sys.stderr)
        sys.exit(2)
