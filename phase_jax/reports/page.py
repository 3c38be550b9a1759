"""The report page (HTML) and the model card (Markdown) of stored runs; templates/ holds their text and looks."""

import dataclasses
import re
import urllib.parse
from collections.abc import Callable, Mapping, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from phase_jax.errors import UserError
from phase_jax.reports import counterfactual, figures, gates, knockout, wording
from phase_jax.reports.curves import Band, Curves, folded, unfolded
from phase_jax.reports.results import Result, Run
from phase_jax.statistics import holm

Images = Mapping[str, bytes]  # as figures.render gives them: the content of each file, by its ending


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of text cells; `tags` are the protocols of the rows, where rows are of one protocol."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    tags: Sequence[str] | None = None


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure on the page: its name is also that of its files; `view` and `protocol` are what toggles choose by."""

    name: str
    caption: str
    description: str
    images: Images
    data: Table
    view: str | None = None
    protocol: str | None = None

    @property
    def svg(self) -> Markup:
        return Markup(figures.inline(self.images[".svg"], self.name))


@dataclasses.dataclass(frozen=True)
class Page:
    """Everything that a report writes: two texts, and the images of its figures by name."""

    html: str
    card: str
    images: Mapping[str, Images]


def build(runs: Sequence[Run], *, commands: Sequence[str], versions: Mapping[str, str], made: str, folder: str) -> Page:
    """The page and the card of `runs`, which they say were made by `commands` with `versions` on the day `made`.

    `folder` is where the images will lie, as the card's links name it.
    """
    pairs = [(run, result) for run in runs for result in run.results]
    adjusted = holm([result.report["p_value"] for _, result in pairs]) if len(runs) > 1 else None
    anchors = _anchors(runs)
    sections = [_section(run, anchors[run.name], _nll_limit(pairs)) for run in runs]
    comparison = _comparison(runs) if len(runs) > 1 else []
    pictures = [
        *comparison,
        *(picture for section in sections for picture in (*section["pictures"], *section["causes"])),
    ]
    protocols = list(dict.fromkeys(result.protocol for _, result in pairs))
    context = {
        "title": f"Phase report: {runs[0].name}" if len(runs) == 1 else f"Phase report: {len(runs)} models",
        "made": made,
        "findings": [_findings(run, anchors[run.name]) for run in runs],
        "numbers": _numbers(pairs, adjusted),
        "tests": len(pairs) if len(runs) > 1 else None,
        "phases": _phases(pairs),
        "prompts": _prompts(pairs),
        "comparison": comparison,
        "sections": sections,
        "protocols": [(name, wording.padding(name), wording.PROTOCOL_WORDS.get(name)) for name in protocols],
        "tasks": _tasks(runs),
        "limits": wording.limits(runs, adjusted),
        "commands": commands,
        "versions": versions,
        "all_stored": all(result.scores is not None for _, result in pairs),
        "folder": folder,
        "link": urllib.parse.quote(folder),
    }
    return Page(
        _unbroken(_environment("html").get_template("report.html").render(context)),
        _unbroken(_environment("md").get_template("card.md").render(context)),
        {picture.name: picture.images for picture in pictures},
    )


def _environment(language: str) -> Environment:
    """Templates that escape what they are given, for HTML or for Markdown."""
    environment = Environment(
        loader=PackageLoader("phase_jax.reports"),
        autoescape=language == "html",
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["escaped"] = markdown
    return environment


def _unbroken(text: str) -> str:
    """The text with every number and its percent sign on one line."""
    return re.sub(r"(?<=\d) %", "\N{NO-BREAK SPACE}%", text)


def markdown(text: str) -> str:
    """Text as Markdown shows it literally, in a table cell too."""
    return re.sub(r"([\\`*_{}\[\]<>#|~&])", r"\\\1", text).replace("\n", " ")


def _anchors(runs: Sequence[Run]) -> dict[str, str]:
    """A slug for every run's name, no two alike."""
    anchors: dict[str, str] = {}
    for run in runs:
        wanted = slug(run.name)
        same = sum(wanted == slug(name) for name in anchors)
        anchors[run.name] = f"{wanted}-{same + 1}" if same else wanted
    return anchors


def _findings(run: Run, anchor: str) -> dict:
    verdicts = dict.fromkeys(result.report["verdict"] for result in run.results)
    return {
        "name": run.name,
        "anchor": anchor,
        "architecture": wording.architecture(run.results[0].report),
        "verdicts": [(verdict, slug(verdict)) for verdict in verdicts],
        "sentence": wording.finding(run.results),
    }


def slug(*names: str) -> str:
    """Names as a part of a file name and an id."""
    return re.sub(r"[^A-Za-z0-9_]+", "-", "-".join(names)).strip("-").lower() or "unnamed"


def _nll_limit(pairs: Sequence[tuple[Run, Result]]) -> float | None:
    """The end of every NLL axis of the page, so that all compare."""
    highest = [max(result.report["nll"]) for _, result in pairs if result.report["nll"]]
    return 1.12 * max(highest) if highest else None


def _section(run: Run, anchor: str, nll_limit: float | None) -> dict:
    """One model: its pictures and its facts."""
    report = run.results[0].report
    pictures = []
    for view, curves_of in (("unfolded", unfolded), ("folded", folded)):
        for result in run.results:
            curves = curves_of(result)
            if curves is not None:
                pictures.append(_curve_picture(run, anchor, result, view, curves, nll_limit))
    return {
        **_findings(run, anchor),
        "pictures": pictures,
        "causes": _causes(run, anchor),
        "folds": report["S"] is not None,
        "facts": _facts(run),
    }


def _causes(run: Run, anchor: str) -> list[Picture]:
    """What interventions on one model found. Raises UserError for what they did not store."""
    try:
        return [
            Picture(
                slug(anchor, drawing.name),
                drawing.caption,
                drawing.description,
                figures.render(drawing.figure),
                Table(drawing.headings, drawing.rows),
            )
            for made in (knockout, counterfactual, gates)
            for drawing in made.drawings(run.interventions)
        ]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{run.source / 'interventions'}: a file there is not as our causal tools store it"
            f" ({type(error).__name__}: {error}); remove it and measure again"
        ) from None


def _curve_picture(
    run: Run, anchor: str, result: Result, view: str, curves: Curves, nll_limit: float | None
) -> Picture:
    report = result.report
    accuracy, unit = curves.accuracy, "phase" if curves.folded else "residue"
    lowest, highest = int(accuracy.value.argmin()), int(accuracy.value.argmax())
    headings, columns = ["accuracy", "95 % interval"], [map(wording.percent, accuracy.value), _bounds(accuracy)]
    if curves.nll is not None:
        headings += ["NLL (nats)", *([] if curves.nll.low is None else ["95 % interval"])]
        columns += [map(wording.number, curves.nll.value)]
        if curves.nll.low is not None:
            columns += [_bounds(curves.nll, lambda pair: "–".join(map(wording.number, pair)))]
    rows = [[str(place), *cells] for place, cells in enumerate(zip(*columns, strict=True))]
    folding = f"folded to the {report['S']} phases" if curves.folded else f"over {report['residues']} residues"
    return Picture(
        slug(anchor, result.protocol, view),
        f"{wording.padding(result.protocol)}, {folding}",
        f"Accuracy of {run.name} under {wording.padding(result.protocol)}, {folding}: from"
        f" {wording.percent(accuracy.value[lowest])} at {unit} {lowest} to {wording.percent(accuracy.value[highest])}"
        f" at {unit} {highest}, mean {wording.percent(report['mean'])}.",
        figures.render(figures.curve_figure(curves, report, nll_limit)),
        Table([unit, *headings], rows),
        view,
        result.protocol,
    )


def _bounds(band: Band, text: Callable = wording.percents) -> list[str]:
    return [text(pair) for pair in zip(band.low, band.high, strict=True)]


def _comparison(runs: Sequence[Run]) -> list[Picture]:
    """All models on shared axes: the summary numbers, the gaps, and a picture a protocol of the curves."""
    reports = [[result.report for result in run.results] for run in runs]
    names = [run.name for run in runs]
    pairs = [(run, result) for run in runs for result in run.results]
    pictures = []
    for name, caption, label, markers in _OVERVIEWS:
        rows = [_row(run, result, *(_with_interval(result.report, x) for x in markers)) for run, result in pairs]
        image = figures.render(figures.overview_figure(names, reports, markers, label))
        table = Table(["model", "padding", *markers], rows, _tags(pairs))
        pictures.append(Picture(name, caption, f"{caption}, of {len(runs)} models on one axis.", image, table))
    for protocol in dict.fromkeys(_tags(pairs)):
        chosen = [
            (name, report)
            for name, group in zip(names, reports, strict=True)
            for report in group
            if report["protocol"] == protocol
        ]
        shown, curves = [name for name, _ in chosen], [report for _, report in chosen]
        longest = max(report["residues"] for report in curves)
        values = [
            [
                str(residue),
                *(wording.percent(r["accuracy"][residue] if residue < r["residues"] else None) for r in curves),
            ]
            for residue in range(longest)
        ]
        pictures.append(
            Picture(
                slug("curves", protocol),
                f"{wording.padding(protocol)}, accuracy over residues",
                f"Accuracy over residues of {wording.listed(shown)} under {wording.padding(protocol)}, one above the"
                " other on shared axes.",
                figures.render(figures.stack_figure(shown, curves)),
                Table(["residue", *shown], values),
                protocol=protocol,
            )
        )
    return pictures


_OVERVIEWS = (  # name, caption, label of the axis, markers of the fields
    (
        "overview",
        "Mean and worst residue, with 95 % intervals",
        "accuracy: mean ●, worst residue ◆",
        {"mean": "o", "worst": "D"},
    ),
    ("gaps", "Gap, with 95 % intervals", "gap between best and worst residue", {"gap": "s"}),
)


def _facts(run: Run) -> list[tuple[str, str]]:
    """What is known of a model, as terms and descriptions."""
    report = run.results[0].report
    facts = [("model", run.model), ("attention", wording.architecture(report))]
    if run.config:
        model, train = run.config.get("model", {}), run.config.get("train", {})
        facts += [
            (name, f"{values[key]:,}" if isinstance(values[key], int) else str(values[key]))
            for name, values, key in (
                ("layers", model, "layers"),
                ("width", model, "width"),
                ("query heads", model, "query_heads"),
                ("training steps", train, "steps"),
                ("sequences a step", train, "batch"),
            )
            if values.get(key) is not None
        ]
        facts.append(("seed", str(run.config.get("seed", wording.NONE))))
    facts.append(("validation loss", wording.number(report["validation_loss"], 3)))
    facts.append(("read from", str(run.source)))
    return facts


def _tasks(runs: Sequence[Run]) -> list[str]:
    """The task of the runs in plain words, each once; empty where no configuration is stored."""
    sentences = []
    for run in runs:
        data = (run.config or {}).get("data", {})
        if {"records", "demonstrations", "length", "words"} <= data.keys():
            vocabulary, names = run.config.get("model", {}).get("vocabulary"), data.get("names") or data["words"]
            among = f"all {vocabulary:,} tokens" if vocabulary else "the whole vocabulary"
            sentences.append(
                f"A prompt of {data['length']:,} tokens holds {data['records']} records, each an animal followed by its"
                f" name, then {data['demonstrations']} of them again as demonstrations, and last one more of the"
                f" animals. The answer is right if, among {among}, that animal's name is the model's first choice."
                f" Guessing among the {names} names would be right {wording.percent(1 / names)} of the"
                " time."
            )
    return list(dict.fromkeys(sentences))


def _row(run: Run, result: Result, *cells: str) -> list[str]:
    return [run.name, wording.PROTOCOL_NAMES.get(result.protocol, result.protocol), *cells]


def _with_interval(report: Mapping, field: str) -> str:
    """`52.3 % (49.1–55.0 %)`."""
    return f"{wording.percent(report[field])} ({wording.percents(report[field + '_interval'])})"


def _tags(pairs: Sequence[tuple[Run, Result]]) -> list[str]:
    return [result.protocol for _, result in pairs]


def _numbers(pairs: Sequence[tuple[Run, Result]], adjusted) -> Table:
    """The main table: every number with its interval, and the verdict."""
    headings = [
        *("model", "padding", "verdict", "mean", "worst", "at residue", "gap", "period", "σ", "NLL (nats)", "p"),
        *([] if adjusted is None else ["p (Holm)"]),
        "percentile interval of the gap (biased)",
    ]
    rows = []
    for place, (run, result) in enumerate(pairs):
        report = result.report
        mean, worst, gap, sigma = (_with_interval(report, name) for name in ("mean", "worst", "gap", "sigma"))
        nll = None if report["nll"] is None else sum(report["nll"]) / report["residues"]
        cells = [report["verdict"], mean, worst, str(report["worst_residue"]), gap]
        cells += [str(report["period"] or "none"), sigma, wording.number(nll), wording.p_value(report["p_value"])]
        cells += [] if adjusted is None else [wording.p_value(float(adjusted[place]))]
        rows.append(_row(run, result, *cells, wording.percents(report["gap_percentile_interval"])))
    return Table(headings, rows, _tags(pairs))


def _phases(pairs: Sequence[tuple[Run, Result]]) -> Table:
    """The folded numbers, with the boundary phase apart from the phases within the window."""
    headings = (
        *("model", "padding", "stride", "phases covered", "prompts a phase", "worst phase", "gap of phases"),
        *("σ of phases", "boundary phase", "phases within the window", "gap within the window"),
    )
    rows = []
    for run, result in pairs:
        report = result.report
        stride, phases = report["S"], report["by_phase"]
        if stride is None:
            rows.append(_row(run, result, *[wording.NONE] * (len(headings) - 2)))
            continue
        within = phases[:-1] if report["boundary_phase"] is not None and phases else None
        worst = f"{wording.percent(report['phase_worst'])} (phase {phases.index(min(phases))})" if phases else None
        boundary = report["boundary_phase"]
        rows.append(
            _row(
                run,
                result,
                str(stride),
                f"{stride} of {stride}",
                f"{report['n_logical'] * report['residues'] // stride:,}",
                worst or wording.NONE,
                wording.percent(report["phase_gap"]),
                wording.percent(report["phase_sigma"]),
                wording.NONE if boundary is None else f"{wording.percent(boundary)} (phase {stride - 1})",
                wording.percents((min(within), max(within))) if within else wording.NONE,
                wording.percent(report["within_window_gap"]),
            )
        )
    return Table(headings, rows, _tags(pairs))


def _prompts(pairs: Sequence[tuple[Run, Result]]) -> Table:
    """How many prompts there were, and what was checked of them."""
    headings = (
        *("model", "padding", "logical samples", "residues", "prompts", "prompt length", "target matched"),
        *("means differ by (tokens)", "variances differ by", "distractors in step", "association (Cramér’s V)"),
    )
    rows = []
    for run, result in pairs:
        report = result.report
        checks = report["checks"] or {}
        matched = checks.get("matched")
        rows.append(
            _row(
                run,
                result,
                f"{report['n_logical']:,}",
                str(report["residues"]),
                f"{report['n_logical'] * report['residues']:,}",
                wording.number(report.get("prompt_length"), 0),
                wording.NONE if matched is None else "yes" if matched else "no",
                wording.number(checks.get("mean_deviation"), 3),
                wording.percent(checks.get("variance_deviation")),
                wording.number((checks.get("distractors") or {}).get("lockstep")),
                wording.number((checks.get("distractors") or {}).get("cramers_v")),
            )
        )
    return Table(headings, rows, _tags(pairs))
