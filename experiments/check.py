"""`phase-jax check`: a release gate on the worst phase and the gap, from stored results of this or any other system.

    phase-jax check runs/mine --min-worst 0.6 --max-gap 0.1

Exit code 0: passed. 1: failed. 3: undecided, the interval holds the limit at this sample size. 2: unusable
input.
"""

import argparse
import csv
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from phase_jax.errors import UserError
from phase_jax.statistics import as_correct, gap_interval, summarise, worst_interval
from phase_jax.statistics.arrays import check_stride

PASS, FAIL, UNDECIDED = "pass", "fail", "undecided"
EXIT_CODES = {PASS: 0, FAIL: 1, UNDECIDED: 3}
COLUMNS = ("logical_id", "residue", "correct")
_TRUE, _FALSE = {"1", "1.0", "true"}, {"0", "0.0", "false"}


@dataclass(frozen=True)
class Sweep:
    """One evaluation: its name, correct[N, R], nll[N, R] where stored, and the stride where known."""

    name: str
    correct: np.ndarray
    nll: np.ndarray | None = None
    stride: int | None = None


@dataclass(frozen=True)
class Finding:
    """What one limit came to, in a word and in a sentence that names the bound that decided it."""

    outcome: str
    sentence: str


def load(path: Path) -> list[Sweep]:
    """Read a run folder (every evaluations/*.npz), an .npz, a .json or a .csv.

    Raises UserError, in one line that names the file and the remedy, for anything it cannot use.
    """
    if path.is_dir():
        files = sorted(path.glob("evaluations/*.npz"))
        if not files:
            raise UserError(f"{path}: no evaluations/*.npz in this folder; run `phase-jax evaluate` first")
        return [sweep for file in files for sweep in load(file)]
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    readers = {".npz": _read_npz, ".json": _read_json, ".csv": _read_csv}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UserError(f"{path}: expected a run folder or a file ending in {', '.join(readers)}")
    try:
        return [_checked(reader(path))]
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def check_worst(sweep: Sweep, limit: float, confidence: float) -> Finding:
    """Is the worst residue's accuracy at least `limit`?"""
    worst = summarise(sweep.correct.mean(axis=0))
    low, high = worst_interval(sweep.correct, confidence=confidence)
    place = _residue(worst["worst_residue"], sweep.stride)
    said = f"worst {worst['worst']:.4f} at {place}, {_interval(low, high, confidence)}, limit >= {limit:g}"
    return _at_least(low, high, limit, said)


def check_gap(sweep: Sweep, limit: float, confidence: float) -> Finding:
    """Is the gap between the best and the worst residue at most `limit`?"""
    gap = np.ptp(sweep.correct.mean(axis=0))
    low, high = gap_interval(sweep.correct, confidence=confidence)
    said = f"gap {gap:.4f}, {_interval(low, high, confidence)}, limit <= {limit:g}"
    if high <= limit:
        return Finding(PASS, f"{said}: even the upper bound {high:.4f} is within it")
    if low > limit:
        return Finding(FAIL, f"{said}: even the lower bound {low:.4f} is above it")
    return Finding(UNDECIDED, f"{said}: it lies inside the interval; more logical samples are needed")


def check_nll(sweep: Sweep, quantile: float, limit: float, confidence: float) -> Finding:
    """Is the NLL's `quantile` at most `limit` at every residue?

    It is just where a share of at least `quantile` of the samples has an NLL of at most `limit`; so this is
    the question for the worst residue, asked of "NLL within the limit" in the place of "answered right".
    """
    if sweep.nll is None:
        raise UserError(f"{sweep.name}: no NLLs stored; leave out --max-nll-quantile or add an nll column")
    within = sweep.nll <= limit
    worst = summarise(within.mean(axis=0))
    low, high = worst_interval(within, confidence=confidence)
    place = _residue(worst["worst_residue"], sweep.stride)
    said = (
        f"share with NLL <= {limit:g}: worst {worst['worst']:.4f} at {place}, {_interval(low, high, confidence)}, "
        f"limit >= {quantile:g}"
    )
    return _at_least(low, high, quantile, said)


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code (0, 1 or 3). Raises UserError for unusable input."""
    parser = argparse.ArgumentParser(
        prog="phase-jax check",
        description="Gate a release on its worst phase and its gap. The bounds of the confidence intervals decide, "
        "not the estimates.",
        epilog="example: phase-jax check runs/mine --min-worst 0.6 --max-gap 0.1. "
        "Exit code 0: passed, 1: failed, 3: undecided at this sample size, 2: unusable input.",
    )
    parser.add_argument(
        "run",
        type=Path,
        metavar="RUN",
        help="a run folder with evaluations/*.npz; an .npz with correct[N, R] and maybe nll[N, R]; a .csv with the "
        "columns logical_id, residue, correct and maybe nll; or a .json: a list of such records, or "
        '{"correct": [[...]], "nll": ..., "stride": ...}',
    )
    parser.add_argument("--min-worst", type=float, metavar="A", help="lowest accuracy allowed at any residue")
    parser.add_argument("--max-gap", type=float, metavar="D", help="largest gap allowed between two residues")
    parser.add_argument(
        "--max-nll-quantile",
        type=_quantile_and_limit,
        metavar="Q:X",
        help="at every residue the quantile Q of the NLL may be at most X nats, e.g. 0.99:4.5",
    )
    parser.add_argument("--confidence", type=float, default=0.95, help="of the intervals (default 0.95)")
    args = parser.parse_args(argv)
    if not 0 < args.confidence < 1:
        raise UserError(f"--confidence {args.confidence:g}: give a number between 0 and 1, such as 0.95")
    for option, value in {"--min-worst": args.min_worst, "--max-gap": args.max_gap}.items():
        if value is not None and not 0 <= value <= 1:
            raise UserError(f"{option} {value:g}: give a fraction between 0 and 1, not percent")
    if args.min_worst is None and args.max_gap is None and args.max_nll_quantile is None:
        raise UserError("nothing to check; give --min-worst, --max-gap or --max-nll-quantile")

    outcomes = set()
    for sweep in load(args.run):
        findings = []
        if args.min_worst is not None:
            findings.append(check_worst(sweep, args.min_worst, args.confidence))
        if args.max_gap is not None:
            findings.append(check_gap(sweep, args.max_gap, args.confidence))
        if args.max_nll_quantile is not None:
            findings.append(check_nll(sweep, *args.max_nll_quantile, args.confidence))
        rows, residues = sweep.correct.shape
        print(f"{sweep.name} ({rows:,} logical samples, {residues} residues)")
        for finding in findings:
            print(f"  {finding.outcome:<9} {finding.sentence}")
            outcomes.add(finding.outcome)
    overall = next(outcome for outcome in (FAIL, UNDECIDED, PASS) if outcome in outcomes)
    print(overall)
    return EXIT_CODES[overall]


def _at_least(low: float, high: float, limit: float, said: str) -> Finding:
    if low >= limit:
        return Finding(PASS, f"{said}: even the lower bound {low:.4f} reaches it")
    if high < limit:
        return Finding(FAIL, f"{said}: even the upper bound {high:.4f} is below it")
    return Finding(UNDECIDED, f"{said}: it lies inside the interval; more logical samples are needed")


def _interval(low: float, high: float, confidence: float) -> str:
    return f"{100 * confidence:g} % interval [{low:.4f}, {high:.4f}]"


def _residue(residue: int, stride: int | None) -> str:
    return f"residue {residue}" + (f" (phase {residue % stride} of stride {stride})" if stride else "")


def _quantile_and_limit(text: str) -> tuple[float, float]:
    try:
        quantile, limit = (float(part) for part in text.split(":"))
    except ValueError:
        quantile = limit = math.nan
    if not (0 < quantile < 1 and math.isfinite(limit)):
        raise argparse.ArgumentTypeError(f"'{text}' is not Q:X with 0 < Q < 1, such as 0.99:4.5")
    return quantile, limit


def _checked(sweep: Sweep) -> Sweep:
    """The sweep with checked arrays; raises ValueError as the statistics do."""
    correct = as_correct(sweep.correct)
    if sweep.stride is not None:
        if isinstance(sweep.stride, bool) or not isinstance(sweep.stride, int):
            raise ValueError(f"stride {sweep.stride!r} is not a whole number")
        check_stride(sweep.stride, correct.shape[1])
    if sweep.nll is None:
        return Sweep(sweep.name, correct, None, sweep.stride)
    try:
        nll = np.asarray(sweep.nll, np.float64)
    except (TypeError, ValueError):
        raise ValueError("nll: expected numbers, as many in every row") from None
    if nll.shape != correct.shape:
        raise ValueError(f"nll: expected the shape of correct, {correct.shape}, got {nll.shape}")
    if np.isnan(nll).any():
        raise ValueError("nll: holds NaN; leave out or redo those samples")
    return Sweep(sweep.name, correct, nll, sweep.stride)


def _read_npz(path: Path) -> Sweep:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            stored = {name: arrays[name] for name in ("correct", "nll") if name in arrays}
    except (ValueError, EOFError, OSError) as error:
        if isinstance(error, (PermissionError, IsADirectoryError)):
            raise
        raise ValueError("not a readable .npz file; write it again") from None
    if "correct" not in stored:
        raise ValueError("no array named correct; store correct[N, R] with that name")
    return Sweep(str(path), stored["correct"], stored.get("nll"))


def _read_json(path: Path) -> Sweep:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError:
        raise ValueError("not valid JSON") from None
    if isinstance(content, list):
        return _from_records(str(path), content, "record")
    if not isinstance(content, dict) or "correct" not in content:
        raise ValueError('expected {"correct": [[...]]} or a list of records with ' + ", ".join(COLUMNS))
    return Sweep(str(path), content["correct"], content.get("nll"), content.get("stride"))


def _read_csv(path: Path) -> Sweep:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            records = list(csv.DictReader(file, skipinitialspace=True))
    except (csv.Error, UnicodeDecodeError):
        raise ValueError("not a readable CSV file in UTF-8") from None
    return _from_records(str(path), records, "data row")


def _from_records(name: str, records: list, unit: str) -> Sweep:
    """Put records {logical_id, residue, correct[, nll]} in a grid; every sample needs every residue just once."""
    if not records:
        raise ValueError(f"no {unit}s; expected the columns {', '.join(COLUMNS)}")
    with_nll = isinstance(records[0], dict) and "nll" in records[0]
    grid: dict[str, dict[int, tuple[bool, float]]] = {}
    for number, record in enumerate(records, start=1):
        where = f"{unit} {number}"
        if not isinstance(record, dict):
            raise ValueError(f"{where} is not a record with {', '.join(COLUMNS)}")
        missing = [column for column in COLUMNS if record.get(column) in (None, "")]
        if missing:
            raise ValueError(f"{where} has no {missing[0]}; the columns {', '.join(COLUMNS)} are needed")
        residue = _whole(record["residue"], where)
        cells = grid.setdefault(str(record["logical_id"]), {})
        if residue in cells:
            raise ValueError(
                f"{where} repeats logical_id {record['logical_id']}, residue {residue}; keep one answer of each"
            )
        nll = _number(record.get("nll"), where) if with_nll else math.nan
        cells[residue] = _right(record["correct"], where), nll
    residues = 1 + max(residue for cells in grid.values() for residue in cells)
    for logical_id, cells in grid.items():
        if len(cells) < residues:
            lacking = next(residue for residue in range(residues) if residue not in cells)
            raise ValueError(
                f"logical_id {logical_id} has no residue {lacking}; every sample needs residues 0 to {residues - 1}"
            )
    table = [[cells[residue] for residue in range(residues)] for cells in grid.values()]
    correct = np.array([[cell[0] for cell in row] for row in table])
    return Sweep(name, correct, np.array([[cell[1] for cell in row] for row in table]) if with_nll else None)


def _whole(value, where: str) -> int:
    number = _number(value, where, "residue")
    if number < 0 or number != int(number):
        raise ValueError(f"{where}: residue {value} is not a whole number from 0 up")
    return int(number)


def _number(value, where: str, column: str = "nll") -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{where}: {column} {value!r} is not a finite number")
    return number


def _right(value, where: str) -> bool:
    text = str(value).strip().lower()
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise ValueError(f"{where}: correct is {value!r}; it must be 0 or 1 (leave out or redo unanswered samples)")


if __name__ == "__main__":
    raise SystemExit(main())
