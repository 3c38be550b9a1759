"""Checks the kernels on this machine's accelerator, then times them: python -m experiments.device_check --out FILE.

Every case runs on fresh random inputs against its plain form in f32; the benchmark follows for as long as there is
time. What is known is written to FILE after every case. Needs JAX, numpy and jaxtyping
only. Exit code 1 where a kernel is wrong.
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# ‖error‖ / ‖result‖: bf16 outputs are rounded once, and gradients are computed from rounded entries.
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}


def main(argv: Sequence[str]) -> int:
    arguments = argparse.ArgumentParser(
        prog="python -m experiments.device_check", description=__doc__.partition("\n")[0]
    )
    arguments.add_argument("--out", type=Path, required=True, help="JSON of all that was found")
    arguments.add_argument("--only", default="", metavar="PATTERN", help="cases whose kernel and name match it")
    arguments.add_argument(
        "--seconds", type=float, default=330, help="no case is begun after that (default %(default)s)"
    )
    arguments.add_argument("--interpret", action="store_true", help="no accelerator: interpret the kernels on the CPU")
    options = arguments.parse_args(argv)
    if options.interpret:
        os.environ["JAX_PLATFORMS"] = "cpu"
    began = time.monotonic()

    import jax

    from experiments.kernel_cases import all_cases
    from experiments.kernel_cases.measure import copy_bandwidth, errors, lines, matmul_rate, measure, ratios
    from pallas_kernels import request

    cases = [case for case in all_cases() if re.search(options.only, f"{case.kernel}: {case.name}")]
    seed = int.from_bytes(os.urandom(4), "little")
    found = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "seed": seed, "errors": [], "rows": []}
    wrong = 0
    print(f"{found['device']}, jax {found['jax']}, seed {seed}, {len(cases)} cases")

    def late() -> bool:
        return time.monotonic() - began > options.seconds

    def write() -> None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1))

    with request("pallas", interpret=options.interpret):
        for number, case in enumerate(cases):
            if late():
                break
            row = {"kernel": case.kernel, "case": case.name}
            try:
                row["errors"] = errors(case, jax.random.fold_in(jax.random.key(seed), number))
                row["right"] = all(e <= TOLERANCE[case.dtype] for e in row["errors"].values())
                said = ", ".join(f"{name} {e:.1e}" for name, e in row["errors"].items())
            except NotImplementedError as error:  # no form for this call on this platform
                row["unsupported"] = said = str(error)
            except Exception as error:  # whatever a compiler or a driver raises is a finding, and the rest goes on
                row["right"], row["failed"] = False, repr(error)[:2000]
                said = row["failed"][:200]
            wrong += row.get("right") is False
            verdict = {True: "right", False: "WRONG", None: "unsupported"}[row.get("right")]
            print(f"{verdict:<12}{case.kernel}: {case.name}: {said}", flush=True)
            found["errors"].append(row)
            write()
    if not options.interpret:
        found |= {"bandwidth": copy_bandwidth(), "matmul": matmul_rate()}
        for case in cases:
            if late():
                print("out of time")
                break
            new = ratios(list(measure(case, True, jax.random.key(seed))))
            print("\n".join(lines(new, found["bandwidth"], found["matmul"])), flush=True)
            found["rows"] += new
            write()
    print(f"{wrong} wrong of {len(found['errors'])}; {time.monotonic() - began:.0f} s; {options.out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
