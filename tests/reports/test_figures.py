"""Figures are reproducible, and on a page they take its colours and share no id."""

import re

from phase_jax.reports import figures
from phase_jax.reports.curves import folded
from phase_jax.reports.results import load


def test_rendering_is_reproducible_and_inline_figures_follow_the_page(lab_folder):
    (run,) = load([lab_folder / "kvc_w8s8_1kv_baseline"])
    result = run.results[0]
    images, again = (
        figures.render(figures.curve_figure(folded(result), result.report, nll_limit=3.0)) for _ in range(2)
    )
    assert images == again and set(images) == {".png", ".svg"}
    svg = figures.inline(images[".svg"], "one")
    assert not re.search(r"#[0-9a-f]{6}\b", svg), "a colour that the page cannot change"
    assert "var(--figure-prefix)" in svg and "var(--figure-ink)" in svg
    ids = re.findall(r'\bid="([^"]*)"', svg)
    assert len(ids) == len(set(ids)) and all(name.startswith("one-") for name in ids)
    assert set(re.findall(r'(?:url\(|href=")#([^")]*)', svg)) <= set(ids)
    assert "<style" not in svg and "<metadata" not in svg


def test_names_are_text_not_mathematics(lab_folder):
    (run,) = load([lab_folder / "full_attn_1kv"])
    reports = [run.results[0].report]
    svg = figures.render(figures.stack_figure([r"$\broken_{ <b>"], reports))[".svg"].decode()
    assert r"$\broken_{ &lt;b&gt;" in svg
