"""Numbers and findings in words: percent, intervals, verdicts, protocols, and what may not be concluded."""

from collections.abc import Sequence

from phase_jax.reports.results import PROTOCOLS, Result, Run

NONE = "–"
PROTOCOL_NAMES = {"prefix": "prefix", "insequence": "in-sequence", "target": "target"}
PROTOCOL_WORDS = {
    "prefix": "Filler in front of the records moves all of them together. The distractors change phase in step with"
    " the target.",
    "insequence": "The filler between the records is drawn anew for every residue, given only the target's residue."
    " The distractors' phases do not follow the target's.",
    "target": "Only the target record moves, inside a slot of spare filler. Every other token stays where it is.",
}
PROTOCOL_LIMITS = {
    "prefix": "Under prefix padding the distractors move too: a difference between residues may come from their"
    " phases as well as from the target's.",
    "insequence": "Under in-sequence padding the layout of all records differs between residues, so that chance in the"
    " layout adds to the noise; the intervals include it.",
    "target": "Under target padding the target always has filler around it, and the other records keep one phase each:"
    " that is one kind of layout among many.",
}


def percent(value: float | None) -> str:
    """A fraction as `52.3 %`."""
    return NONE if value is None else f"{100 * value:.1f} %"


def points(value: float | None) -> str:
    """A difference of fractions as `12.3 points`."""
    return NONE if value is None else f"{100 * value:.1f} points"


def percents(low_high: Sequence[float] | None) -> str:
    """An interval of fractions as `49.1–55.0 %`."""
    return NONE if low_high is None else f"{100 * low_high[0]:.1f}–{100 * low_high[1]:.1f} %"


def number(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:,.{digits}f}"


def signed(value: int) -> str:
    """A whole number with its sign, as `−3`."""
    return f"{value:+}".replace("-", "\N{MINUS SIGN}")


def p_value(value: float | None) -> str:
    """Three digits; below a thousandth only that."""
    return NONE if value is None else "< 0.001" if value < 0.001 else f"{value:.3f}"


def padding(*protocols: str) -> str:
    """`prefix and in-sequence padding`."""
    return listed([PROTOCOL_NAMES.get(protocol, protocol) for protocol in protocols]) + " padding"


def listed(items: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def architecture(report: dict) -> str:
    """`W8/S8 · 1 KV head`, or `full attention · …`."""
    heads = report["kv_heads"]
    windows = "full attention" if report["S"] is None else f"W{report['W'] or '?'}/S{report['S']}"
    return windows if heads is None else f"{windows} · {heads} KV head" + ("s" if heads != 1 else "")


def place(report: dict, residue: int) -> str:
    """`residue 15 (phase 7 of 0–7)`."""
    stride = report["S"]
    return f"residue {residue}" + ("" if stride is None else f" (phase {residue % stride} of 0–{stride - 1})")


def finding(results: Sequence[Result]) -> str:
    """A model's verdicts in one plain sentence."""
    clauses = []
    for verdict, clause in {"sensitive": _sensitive, "undecided": _undecided, "not seen": _not_seen}.items():
        reports = [result.report for result in results if result.report["verdict"] == verdict]
        if reports:
            clauses.append(clause(reports, padding(*(report["protocol"] for report in reports))))
    sentence = "; ".join(clauses) + "."
    return sentence[0].upper() + sentence[1:]


def _sensitive(reports: Sequence[dict], protocols: str) -> str:
    worst = min(reports, key=lambda report: report["worst"])
    where = f", under {padding(worst['protocol'])}" if len(reports) > 1 else ""
    period = "" if worst["period"] is None else f"; the curve repeats every {worst['period']} tokens"
    return (
        f"phase sensitive under {protocols}: {percent(worst['mean'])} of the answers are right on average: from"
        f" {percent(worst['worst'])} (95 % interval {percents(worst['worst_interval'])}) where the key is at"
        f" {place(worst, worst['worst_residue'])} to {percent(max(worst['accuracy']))} at the best residue{where}"
        f"{period}"
    )


def _undecided(reports: Sequence[dict], protocols: str) -> str:
    widest = max(reports, key=lambda report: report["gap_interval"][1])
    return (
        f"undecided under {protocols}: the test sees no difference between phases (p = {p_value(widest['p_value'])}),"
        f" but with {widest['n_logical']:,} logical samples it could be as large as"
        f" {points(widest['gap_interval'][1])}"
    )


def _not_seen(reports: Sequence[dict], protocols: str) -> str:
    widest = max(reports, key=lambda report: report["gap_interval"][1])
    means = listed([percent(report["mean"]) for report in reports])
    return (
        f"no phase sensitivity seen under {protocols}: {means} of the answers are right on average, and with 95 %"
        f" confidence no two residues differ by more than {points(widest['gap_interval'][1])}"
    )


def limits(runs: Sequence[Run], adjusted: Sequence[float] | None) -> list[str]:
    """What may not be concluded from these runs, whose results have the p values `adjusted` after Holm."""
    results = [result for run in runs for result in run.results]
    reports = [result.report for result in results]
    measured = {result.protocol for result in results}
    sentences = [PROTOCOL_LIMITS[protocol] for protocol in PROTOCOLS if protocol in measured]
    missing = [protocol for protocol in PROTOCOLS if protocol not in measured]
    if missing:
        sentences.append(f"Nothing is known here about {padding(*missing)}: it was not measured.")
    sentences += [
        "The highest and the lowest of many noisy accuracies differ even where the true ones do not: a gap above zero"
        " is no evidence. The verdict comes from a permutation test within logical samples, the intervals of gap and"
        " worst from bands over all residues. The paper's percentile interval is shown for comparison only: on a flat"
        " model it never holds the true gap of zero.",
        "Bands are for one residue or phase at a time: of 24 bands about one misses the truth.",
        "Intervals cover the choice of prompts, not the choice of training run: another seed of the same model may be"
        " strong at other phases.",
        "A curve that repeats with the stride says where answers fail, not which head, gate or branch fails them.",
        "One prompt length and one query position were measured, and one task. The size of an effect does not carry"
        " over to other lengths, tasks or models.",
    ]
    if any(run.config and run.config.get("model", {}).get("vocabulary", 1e9) < 10_000 for run in runs):
        sentences.append(
            "This is laboratory scale: small models, trained for minutes on a synthetic task. They show the mechanism;"
            " how large it is in a production model has to be measured there."
        )
    if any(report["verdict"] == "not seen" for report in reports):
        sentences.append(
            "“Not seen” means that the gap is probably below ten points, not that it is zero: its upper bound"
            " is in the table."
        )
    if any(report["mean"] < 0.05 or report["mean"] > 0.98 for report in reports):
        sentences.append(
            "Where nearly all answers are wrong, or right, residues have no room to differ: that a model shows no phase"
            " effect there says little about one that is half right."
        )
    if any(report["S"] and report["W"] and report["W"] > report["S"] for report in reports):
        sentences.append(
            "With overlapping windows (W > S) every pair of neighbours shares an entry, so that there is no boundary"
            " phase to set apart."
        )
    if adjusted is not None and any(
        report["verdict"] == "sensitive" and p >= 0.05 for report, p in zip(reports, adjusted, strict=True)
    ):
        sentences.append(
            "Among so many tests some are below 0.05 by chance: a verdict “sensitive” whose p (Holm) is not"
            " below 0.05 may be one of them."
        )
    if any(not (report["checks"] or {}).get("matched", True) for report in reports):
        sentences.append(
            "In some runs the target's position does not match to 1 % over residues, for want of samples (see the"
            " prompts table): there, distance to the query may explain part of a difference."
        )
    return sentences
