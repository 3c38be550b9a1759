"""The stored results that a page is made of, read and checked; a page never needs a model."""

import dataclasses
import json
import math
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from phase_jax.errors import UserError
from phase_jax.run import RunFolder

PROTOCOLS = ("prefix", "insequence", "target")  # the order in which a page shows them; others follow
VERDICTS = ("sensitive", "not seen", "undecided")
SCORES = ("correct", "nll")  # of evaluations/<protocol>.npz, what the bands are made of

_NUMBERS = ("mean", "worst", "gap", "sigma", "p_value")
_INTERVALS = ("mean_interval", "worst_interval", "gap_interval", "gap_percentile_interval", "sigma_interval")
_CURVES = ("accuracy", "wilson_low", "wilson_high")
_NULLABLE_CURVES = ("nll", "gold_probability", "target_position_mean", "target_position_variance")
_NULLABLE_NUMBERS = (
    *("W", "S", "kv_heads", "period", "validation_loss", "normalised_gap"),
    *("phase_worst", "phase_gap", "phase_sigma", "boundary_phase", "within_window_gap"),
)
_REMEDY = "phase-jax evaluate and phase-jax reproduce write reports"


@dataclasses.dataclass(frozen=True)
class Result:
    """One model under one protocol: its report, and where prompts are stored the [n, R] arrays SCORES."""

    report: dict
    scores: Mapping[str, np.ndarray] | None = None

    @property
    def protocol(self) -> str:
        return self.report["protocol"]


@dataclasses.dataclass(frozen=True)
class Run:
    """One model: a name that no other run of the page has, and a result a protocol."""

    name: str
    source: Path
    results: tuple[Result, ...]
    config: dict | None = None
    training: dict | None = None
    interventions: Mapping[str, dict] = dataclasses.field(default_factory=dict)  # what causal tools found, by name

    @property
    def model(self) -> str:
        return self.results[0].report["model"]


def load(paths: Sequence[Path]) -> list[Run]:
    """The runs of run folders, of folders of runs, and of JSON files (a report, or {"reports": [report, …]}).

    Raises UserError, naming the input and the remedy, for anything else.
    """
    runs: dict[Path, list[Run]] = {}
    for path in paths:
        for source in _sources(path):
            runs.setdefault(source.resolve(), _read_folder(source) if source.is_dir() else _read_file(source))
    return _named([run for group in runs.values() for run in group])


def _sources(path: Path) -> list[Path]:
    """The path itself, or the run folders in it."""
    if not path.exists():
        raise UserError(f"{path}: there is no such file or folder; name a run folder or a report's JSON")
    if path.is_file() or RunFolder(path).config.exists():
        return [path]
    inside = sorted(folder for folder in path.iterdir() if RunFolder(folder).config.exists())
    measured = [folder for folder in inside if list(folder.glob("evaluations/*.json"))]
    if measured:
        return measured
    if inside:
        raise UserError(f"{path}: none of its runs is measured yet; run phase-jax evaluate --workdir {inside[0]}")
    raise UserError(f"{path} is no run folder (no config.json) and holds none; phase-jax reproduce makes one")


def _read_folder(path: Path) -> list[Run]:
    folder = RunFolder(path)
    files = sorted(path.glob("evaluations/*.json"))
    if not files:
        raise UserError(f"{path} is not measured yet; run phase-jax evaluate --workdir {path}")
    results = [_with_scores(_checked(_read_json(file), str(file)), file.with_suffix(".npz")) for file in files]
    training = _read_json(folder.training) if folder.training.exists() else None
    interventions = {file.stem: _read_json(file) for file in sorted(path.glob("interventions/*.json"))}
    return [Run("", path, _ordered(results), _read_json(folder.config), training, interventions)]


def _read_file(path: Path) -> list[Run]:
    content = _read_json(path)
    reports = content.get("reports") if isinstance(content, dict) and "reports" in content else [content]
    if not isinstance(reports, list) or not reports:
        raise UserError(f"{path}: 'reports' is not a list with a report in it; {_REMEDY}")
    groups: dict[str, list[list[Result]]] = {}
    for number, report in enumerate(reports):
        where = f"{path}, report {number}" if "reports" in content else str(path)
        result = Result(_checked(report, where))
        runs = groups.setdefault(result.report["model"], [[]])
        if result.protocol in {other.protocol for other in runs[-1]}:
            runs.append([])
        runs[-1].append(result)
    return [Run("", path, _ordered(results)) for runs in groups.values() for results in runs]


def _read_json(path: Path) -> Any:
    """JSON in which NaN and infinities have become null."""
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"), parse_constant=lambda _: None)
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is not readable as JSON ({str(error).splitlines()[0]}); {_REMEDY}") from None


def _with_scores(report: dict, file: Path) -> Result:
    if not file.exists():
        return Result(report)
    try:
        with np.load(file, allow_pickle=False) as arrays:
            scores = {name: np.asarray(arrays[name], np.float64) for name in SCORES if name in arrays}
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{file} is not readable ({error}); remove it and run phase-jax evaluate again") from None
    shape = report["n_logical"], report["residues"]
    fits = "correct" in scores and all(array.shape == shape for array in scores.values())
    if not fits or not np.allclose(scores["correct"].mean(axis=0), report["accuracy"], atol=1e-6):
        raise UserError(f"{file} does not belong to the report beside it; remove it and run phase-jax evaluate again")
    return Result(report, scores)


def _checked(report: Any, where: str) -> dict:
    """The report with every field that a page reads, null where it has none."""

    def need(right: bool, field: str, expected: str) -> None:
        if not right:
            raise UserError(f"{where} is no report of phase-jax: {field} is not {expected}; {_REMEDY}")

    need(isinstance(report, dict), "it", "an object")
    report = {**dict.fromkeys((*_NULLABLE_CURVES, *_NULLABLE_NUMBERS, "by_phase", "checks")), **report}
    for field in ("residues", "n_logical", "worst_residue"):
        need(_is_whole(report.get(field)), field, "a whole number")
    residues, stride = report["residues"], report["S"]
    need(residues >= 2, "residues", "2 or more")
    need(report["n_logical"] >= 1, "n_logical", "1 or more")
    need(report["worst_residue"] < residues, "worst_residue", "a residue")
    for field in _NUMBERS:
        need(_is_number(report.get(field)), field, "a number")
    for field in _INTERVALS:
        need(_are_numbers(report.get(field), 2), field, "a pair of numbers")
    for field in _CURVES:
        need(_are_numbers(report.get(field), residues), field, f"{residues} numbers")
    for field in _NULLABLE_CURVES:
        need(report[field] is None or _are_numbers(report[field], residues), field, f"{residues} numbers or null")
    for field in _NULLABLE_NUMBERS:
        need(report[field] is None or _is_number(report[field]), field, "a number or null")
    need(stride is None or (_is_whole(stride) and stride > 0 and residues % stride == 0), "S", "a divisor of residues")
    need(report["by_phase"] is None or _are_numbers(report["by_phase"], stride or 0), "by_phase", "S numbers or null")
    need(report.get("verdict") in VERDICTS, "verdict", "one of " + ", ".join(VERDICTS))
    for field, otherwise in {"model": "unnamed model", "protocol": "unnamed"}.items():
        name = report.get(field)
        need(name is None or isinstance(name, str), field, "text or null")
        report[field] = name or otherwise
    if not isinstance(report["checks"], dict):
        report["checks"] = None
    return report


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _are_numbers(values: Any, count: int) -> bool:
    return isinstance(values, list) and len(values) == count and all(map(_is_number, values))


def _ordered(results: Iterable[Result]) -> tuple[Result, ...]:
    def place(result: Result) -> tuple[int, str]:
        known = result.protocol in PROTOCOLS
        return PROTOCOLS.index(result.protocol) if known else len(PROTOCOLS), result.protocol

    return tuple(sorted(results, key=place))


def _named(runs: Sequence[Run]) -> list[Run]:
    """Runs named by their models; those that share a model also by their folder, and by number where that is shared."""
    names = [run.model for run in runs]
    for more in (lambda run, _: f"{run.source}", lambda _, place: f"run {place + 1}"):
        names = [
            f"{name} ({more(run, place)})" if names.count(name) > 1 else name
            for place, (run, name) in enumerate(zip(runs, names, strict=True))
        ]
    return [dataclasses.replace(run, name=name) for run, name in zip(runs, names, strict=True)]
