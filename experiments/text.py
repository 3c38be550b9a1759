"""phase-jax text: language models side by side on text, and their losses as a figure and a table."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from experiments.options import parser, run_with
from phase_jax.run import RunConfig, RunFolder, write_json

MODELS = ("full_attn_1kv", "kvc_w8s8_1kv_baseline")


def main(argv: Sequence[str]) -> int:
    arguments = parser(
        "text",
        "Train language models of the lab's size (configs/text.py) on the same text, or continue them, and compare"
        " their losses on held-out documents. Without --corpus the text is Python's own language reference. A second"
        " run reuses what is done.",
        "phase-jax text --models full_attn_1kv kvc_w4s4_1kv --workdir runs/mine",
    )
    arguments.add_argument("--models", nargs="+", default=MODELS, metavar="ID", help="ids of phase-jax configs")
    arguments.add_argument("--corpus", type=Path, help="a corpus of bytes (default WORKDIR/corpus, made if missing)")
    arguments.add_argument("--steps", type=int, help="training steps (default: those of configs/text.py)")
    arguments.add_argument("--seed", type=int, help="of initialisation and data (default: the id's own)")
    arguments.add_argument("--workdir", type=Path, default=Path("runs/text"))
    options = arguments.parse_args(argv)
    corpus = options.corpus or options.workdir / "corpus"
    configs = [text_run(variant, corpus, options.steps, options.seed) for variant in options.models]

    from experiments.corpus import make
    from experiments.runtime import prepare
    from phase_jax.data.documents import python_documentation
    from phase_jax.reports.figures import save
    from phase_jax.reports.losses import loss_figure
    from phase_jax.training.loop import train

    prepare()
    if options.corpus is None and not corpus.exists():
        make(python_documentation(), corpus, "pydoc_data.topics", record_tokens=1024, held_out=0.1)
    rows, curves = [], {}
    for config in configs:
        folder = RunFolder(options.workdir / config.id)
        result = train(config, folder)
        curves[config.id] = curve(config, folder, result)
        rows.append(row(config, result, curves[config.id]))
    summary = options.workdir / "summary.json"
    write_json(summary, {"rows": rows})
    images = save(loss_figure(curves, "nats per byte"), options.workdir / "losses")
    Console(width=None if Console().is_terminal else 120).print(table(rows))
    print(", ".join(map(str, (summary, *images))))
    return 0


def text_run(variant: str, corpus: Path, steps: int | None = None, seed: int | None = None) -> RunConfig:
    """The text run of an id on a corpus, with the command line's changes."""
    from configs import text

    config = text.get_config(variant)
    config.data.corpus = str(corpus)
    return run_with(config, steps, seed)


def curve(config: RunConfig, folder: RunFolder, result: dict) -> dict:
    """Losses of a run against tokens, from its metrics.jsonl and what it ended with."""
    lines = [json.loads(line) for line in folder.metrics.read_text(encoding="utf-8").splitlines()]
    tokens = config.train.batch * config.data.length
    validated = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    validated[result["steps"]] = result["validation_loss"]
    return {
        "batch_tokens": [tokens * line["step"] for line in lines],
        "batch_loss": [line["loss"] for line in lines],
        "tokens": [tokens * step for step in validated],
        "validation_loss": list(validated.values()),
    }


def row(config: RunConfig, result: dict, curve: dict) -> dict:
    """What the table says of one run; the training loss is the mean of the last tenth of the logged steps."""
    from experiments.configs import parameter_count
    from phase_jax.training.feed import open_feed

    return {
        "model": config.id,
        "seed": config.seed,
        "parameters": parameter_count(config.model),
        "tokens": config.train.batch * config.data.length * config.train.steps,
        "training_loss": float(np.mean(curve["batch_loss"][-max(1, len(curve["batch_loss"]) // 10) :])),
        "validation_loss": result["validation_loss"],
        "bits_per_byte": result["validation_loss"] / math.log(2),
        "held_out_tokens": sum(batch.tokens.size for batch in open_feed(config).held_out()),
    }


def table(rows: Sequence[dict]) -> Table:
    """The summary as a person reads it."""
    result = Table("model", box=box.SIMPLE_HEAD, title="loss in nats per byte, on held-out documents and in training")
    for heading in ("seed", "parameters", "tokens", "training", "held out", "bits/byte", "held-out tokens"):
        result.add_column(heading, justify="right")
    for r in rows:
        losses = [f"{r[name]:.3f}" for name in ("training_loss", "validation_loss", "bits_per_byte")]
        counts = [f"{r['parameters']:,}", f"{r['tokens']:,}"]
        result.add_row(r["model"], str(r["seed"]), *counts, *losses, f"{r['held_out_tokens']:,}")
    return result
