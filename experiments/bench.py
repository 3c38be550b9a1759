"""phase-jax bench: what things cost, on this machine, in one run."""

import importlib
from collections.abc import Sequence

from phase_jax.errors import UserError
from phase_jax.suggest import unknown

BENCHES = {
    "sweep": "evaluation and training of the lab's models, and the data's share",
    "kernels": "the kernels against their plain forms, and what the machine can do",
    "input": "reading text beside training on it, and the memory that takes",
    "training": "training steps of compressed attention beside full attention's",
    "longcontext": "time and memory of one forward pass against its length",
    "knockout": "all knockouts of a model from one prefill, and by a pass each",
    "transfer": "training steps saved by beginning with a full-attention model",
    "peers": "the same work and weights here and in transformers on torch",
}


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: phase-jax bench NAME …   (phase-jax bench NAME --help tells more)\n")
        print("\n".join(f"  {name:<12} {purpose}" for name, purpose in BENCHES.items()))
        print("\nexample:\n  phase-jax bench sweep --json bench.json")
        return 0
    name, *rest = argv
    if name not in BENCHES:
        raise UserError(unknown("bench", name, BENCHES, "phase-jax bench --help lists them"))
    return importlib.import_module(f"experiments.bench_{name}").main(rest)
