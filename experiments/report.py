"""phase-jax report: stored results as a page for people, a model card, and figures."""

import datetime
import importlib.metadata
import json
import platform
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.options import parser
from phase_jax.errors import UserError

if TYPE_CHECKING:
    from phase_jax.reports.results import Run

PACKAGES = ("phase-jax", "jax", "jaxlib", "flax", "optax", "numpy", "scipy", "matplotlib")


def main(argv: Sequence[str]) -> int:
    arguments = parser(
        "report",
        "Make a page (HTML, one file, no network), a model card (Markdown) and figures (PNG, SVG) of stored results."
        " Several runs are compared on shared axes.",
        "phase-jax report runs/reproduce --out runs/reproduce/report.html",
    )
    arguments.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="a run folder, a folder of runs as reproduce makes it, or a JSON file: a report or a summary of reports",
    )
    arguments.add_argument(
        "--out", type=Path, default=Path("report.html"), metavar="FILE.html", help="the page (default report.html)"
    )
    options = arguments.parse_args(argv)
    if options.out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out {options.out}: the page is HTML; name it {options.out.name}.html")
    if options.out.is_dir():
        raise UserError(f"--out {options.out} is a folder; name a file in it, such as {options.out / 'report.html'}")

    from phase_jax.reports import figures, page, results
    from phase_jax.run import write_atomically

    runs = results.load(options.runs)
    folder = options.out.with_name(f"{options.out.stem}-figures")
    made = page.build(
        runs,
        commands=[*(line for run in runs for line in commands(run)), shlex.join(["phase-jax", "report", *argv])],
        versions=versions(),
        made=datetime.date.today().isoformat(),
        folder=folder.name,
    )
    try:
        for name, images in made.images.items():
            figures.write(images, folder / name)
        card = options.out.with_suffix(".md")
        write_atomically(card, made.card)
        write_atomically(options.out, made.html)
    except (NotADirectoryError, FileExistsError, PermissionError) as error:
        raise UserError(f"--out {options.out}: cannot be written ({error.strerror}); choose another place") from None
    print(f"{options.out}, {card}, {folder}/ ({len(made.images)} figures as PNG and SVG)")
    return 0


def versions() -> dict[str, str]:
    """Of Python and of the packages that results depend on."""
    return {"Python": platform.python_version(), **{name: importlib.metadata.version(name) for name in PACKAGES}}


def commands(run: "Run") -> list[str]:
    """The command lines that make a run again; none where its configuration is not stored."""
    if run.config is None:
        return []
    workdir = f"--workdir={run.source}"
    train = ["phase-jax", "train", f"--config=configs/lab.py:{run.config.get('id')}", *overrides(run.config), workdir]
    lines = [shlex.join(train)]
    for result in run.results:
        report = result.report
        options = [f"--protocol={result.protocol}", f"--logical={report['n_logical']}"]
        if report.get("prompt_seed"):
            options.append(f"--seed={report['prompt_seed']}")
        if report.get("prompts"):
            options = [f"--prompts={report['prompts']}"]
        lines.append(shlex.join(["phase-jax", "evaluate", workdir, *options]))
    return lines + [
        shlex.join(
            ["phase-jax", verb, workdir, f"--protocols={name.removeprefix(f'{verb}-')}", *_causal_options(found)]
        )
        for verb in CAUSAL_VERBS
        for name, found in run.interventions.items()
        if name.startswith(f"{verb}-")
    ]


# Gates are aligned with knockouts, which therefore come before.
CAUSAL_VERBS = ("knockout", "counterfactual", "gates", "cycle")
_FLAGS = {
    "n_logical": "--logical",
    "prompt_seed": "--seed",
    "calibration_logical": "--calibration",
    "calibration_seed": "--calibration-seed",
    "means": "--means",
    "band": "--band",
    "controls": "--controls",
}


def _causal_options(found: Mapping) -> list[str]:
    """The flags with which a stored result of a causal tool was made."""
    options = [f"{flag}={found[name]}" for name, flag in _FLAGS.items() if name in found]
    if found.get("sets"):
        options += ["--sets", *found["sets"]]
    if found.get("cycled"):
        deltas = [row["delta"] for row in found["cycled"]]
        options.append(f"--delta={min(deltas)}:{max(deltas)}")
    return options


def overrides(config: Mapping) -> list[str]:
    """`--config.a.b=value` of every field in which a stored configuration differs from the lab's of its id."""
    from configs import lab
    from configs.family import FAMILY

    if config.get("id") not in FAMILY:
        return []
    standard = json.loads(json.dumps(lab.get_config(config["id"]).to_dict()))
    return [f"--config.{path}={value}" for path, value in _changes(config, standard)]


def _changes(found: Mapping, standard: Mapping, prefix: str = "") -> list[tuple[str, str]]:
    changes = []
    for key, value in found.items():
        usual = standard.get(key)
        if isinstance(value, Mapping) and isinstance(usual, Mapping):
            changes += _changes(value, usual, f"{prefix}{key}.")
        elif value != usual:
            changes.append((prefix + key, _literal(value)))
    return changes


def _literal(value: Any) -> str:
    """As a flag takes it: a list as a tuple."""
    return value if isinstance(value, str) else repr(_as_tuple(value)).replace(" ", "")


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value
