"""phase-jax bench transfer: how many training steps it saves to begin with a full-attention model's parameters."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from experiments.options import parser, split_config
from experiments.sweep import run_folder, runs_by_id
from phase_jax.model.transfer import check_transfer
from phase_jax.run import RunConfig, RunFolder, write_json

MODELS = ("kvc_w4s4_1kv", "kvc_w8s8_1kv_baseline")
BATCHES = 8  # held out, the same at every look


def twin(config: RunConfig, init_from: str | None, every: int) -> RunConfig:
    """A run that begins with the parameters in `init_from` and is held against held-out data every so many steps."""
    train = dataclasses.replace(config.train, validate_every=every, validation_batches=BATCHES, init_from=init_from)
    return dataclasses.replace(config, train=train)


def validated(folder: RunFolder, result: dict) -> dict[int, float]:
    """Held-out loss of a trained run by step; the last one is what it ended with."""
    lines = [json.loads(line) for line in folder.metrics.read_text(encoding="utf-8").splitlines()]
    curve = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    return curve | {result["steps"]: result["validation_loss"]}


def first_step(curve: Mapping[int, float], loss: float) -> int | None:
    """The first step at which a curve is at or below `loss`, or None."""
    return next((step for step, value in curve.items() if value <= loss), None)


def compare(scratch: Mapping[int, float], given: Mapping[int, float]) -> dict:
    """Two curves' first steps at the first one's last loss, and half-way to that from its loss at the first look."""
    start, end = scratch[min(scratch)], scratch[max(scratch)]
    levels = {"half": (start + end) / 2, "whole": end}
    steps = {name: [first_step(curve, loss) for curve in (scratch, given)] for name, loss in levels.items()}
    return {"levels": levels, "steps": steps, "last_loss": [end, given[max(given)]]}


def table(rows: Sequence[dict], every: int) -> Table:
    """The rows as a person reads them: from scratch → from full attention."""
    title = f"from scratch → from full attention: steps to a held-out loss, looked at every {every}"
    headings = ("model", "seed", "half-way to scratch's last", "all the way", "last loss")
    result = Table(*headings, title=title, box=box.SIMPLE_HEAD)
    for row in rows:
        steps = [" → ".join("never" if s is None else str(s) for s in row["steps"][level]) for level in row["levels"]]
        losses = " → ".join(f"{loss:.3f}" for loss in row["last_loss"])
        result.add_row(row["model"], str(row["seed"]), *steps, losses)
    return result


def main(argv: Sequence[str]) -> int:
    ours, rest = split_config(argv)
    arguments = parser(
        "bench transfer",
        "Train compressed models twice, from scratch and from a full-attention run of the same seed (train"
        " --init-from), and compare the steps to the same held-out loss. Stopped at any point, the same command goes"
        " on. Full-attention runs of a sweep in the same --workdir are used.",
        "phase-jax bench transfer --seeds 3 4 5 --workdir runs/transfer",
    )
    arguments.add_argument("--ids", nargs="+", default=MODELS, metavar="ID", help="ids of phase-jax configs")
    arguments.add_argument("--seeds", nargs="+", type=int, metavar="SEED", help="(default: each id's own)")
    arguments.add_argument("--source", default="full_attn_1kv", metavar="ID", help="(default full_attn_1kv)")
    arguments.add_argument("--every", type=int, default=20, metavar="STEPS", help="between validations (default 20)")
    arguments.add_argument("--workdir", type=Path, default=Path("runs/transfer"))
    options = arguments.parse_args(rest)
    groups = runs_by_id(ours, [options.source, *options.ids], options.seeds)
    pairs = []
    for (source, _), *others in zip(*groups, strict=True):
        for config, _ in others:
            check_transfer(source.model, config.model)
            starts = (None, str(run_folder(options.workdir, source).path))
            pairs.append((source, [twin(config, start, options.every) for start in starts]))

    from experiments.runtime import prepare
    from phase_jax.training.loop import train

    prepare()
    rows = []
    for source, twins in pairs:
        train(source, run_folder(options.workdir, source))
        curves = []
        for name, config in zip(("scratch", "from-full"), twins, strict=True):
            folder = run_folder(options.workdir / name, config)
            curves.append(validated(folder, train(config, folder)))
        rows.append({"model": config.id, "seed": config.seed, **compare(*curves)})
    write_json(options.workdir / "transfer.json", {"validate_every": options.every, "rows": rows})
    Console(width=140).print(table(rows, options.every))
    print(options.workdir / "transfer.json")
    return 0
