"""phase-jax: one verb a module; this one only dispatches and turns mistakes into one line."""

import errno
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from phase_jax.errors import UserError
from phase_jax.suggest import unknown

VERBS = {
    "reproduce": "train and measure the lab's models: table, figure, summary",
    "corpus": "tokenise texts for training",
    "text": "train language models side by side on text: losses",
    "train": "train one model, or continue its run",
    "evaluate": "sweep all phases of a trained model",
    "knockout": "find the heads that answers are lost with, and at which phases",
    "counterfactual": "say how much of a gap each cause carries",
    "gates": "measure where a trained model's gates look",
    "cycle": "move the gates and see whether the curve follows",
    "flip": "look for a period in how a code prompt is completed",
    "export": "write a full-attention run as a Qwen3 folder",
    "sweep": "train and measure many models and seeds: one table",
    "configs": "list the model family",
    "prompts": "write prompts with known positions for any tokenizer",
    "report": "make a page, a model card and figures of stored results",
    "check": "hold a result against limits: a release gate",
    "calibrate": "measure the error rates of the statistics",
    "fit": "compile a run's training step for TPUs that are not there: memory, FLOPs",
    "bench": "measure what things cost",
}

# These compute nothing that an accelerator would help with, and must not wait for one.
ON_CPU = {"fit", "export", "configs", "corpus", "prompts", "report", "check", "calibrate"}


PCI_DEVICES = Path("/sys/bus/pci/devices")


def leave_absent_tpus_alone() -> None:
    """Where libtpu is installed and no TPU is (no device of its vendor on the bus), JAX must not try to open one.

    It would take half a second and complain on stderr. GPUs, if any, are still used.
    """
    if "JAX_PLATFORMS" in os.environ or importlib.util.find_spec("libtpu") is None:
        return
    if any(vendor.read_text().strip() == "0x1ae0" for vendor in PCI_DEVICES.glob("*/vendor")):
        return
    gpu = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
    os.environ["JAX_PLATFORMS"] = "cuda,cpu" if gpu else "cpu"


def usage() -> str:
    """The list of verbs."""
    lines = [f"  {verb:<14} {purpose}" for verb, purpose in VERBS.items()]
    return "\n".join(["usage: phase-jax VERB …   (phase-jax VERB --help tells more)", "", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb. Exit codes: 0 done, 2 a mistake in the input, 130 Ctrl-C; `check` has its own."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    verb, *rest = argv
    try:
        if verb not in VERBS:
            raise UserError(unknown("verb", verb, VERBS, "phase-jax --help lists them"))
        if verb in ON_CPU:
            os.environ["JAX_PLATFORMS"] = "cpu"
        leave_absent_tpus_alone()
        return importlib.import_module(f"experiments.{verb}").main(rest)
    except UserError as error:
        print(f"phase-jax: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(
            f"phase-jax: no space left on the disk ({error.filename}); what was saved before is whole",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output is gone (| head); Python would complain again on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
