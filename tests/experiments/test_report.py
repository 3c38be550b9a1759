"""phase-jax report: what it writes, and what a browser makes of it."""

import html.parser
import json
import os
import re
import shutil

import pytest

from experiments.cli import main
from experiments.report import overrides
from tests.reports.lab import write_lab, write_run

HOSTILE = "<script>alert(1)</script> & | $x_{"


@pytest.fixture(scope="module")
def lab_folder(tmp_path_factory):
    return write_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="module")
def page(lab_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    assert main(["report", str(lab_folder), "--out", str(path)]) == 0
    return path


class Outline(html.parser.HTMLParser):
    """Headings, images and addresses of a page."""

    def __init__(self, text):
        super().__init__()
        self.headings, self.images, self.addresses, self.ids = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.headings += [int(tag[1])] if re.fullmatch("h[1-6]", tag) else []
        self.images += [attributes.get("aria-label")] if attributes.get("role") == "img" else []
        self.addresses += [attributes[name] for name in ("src", "href", "xlink:href") if name in attributes]
        self.ids += [attributes["id"]] if "id" in attributes else []


def test_page_card_and_figures_are_whole(page):
    text, card = page.read_text(), page.with_suffix(".md").read_text()
    figures = sorted(file.name for file in page.with_name("report-figures").iterdir())
    assert len(figures) == 2 * 10 and {name.rpartition(".")[2] for name in figures} == {"png", "svg"}
    assert not list(page.parent.rglob("*.partial"))
    outline = Outline(text)
    assert len(outline.images) == 10 and all(outline.images)
    assert outline.headings[0] == 1 and outline.headings.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(outline.headings, outline.headings[1:], strict=False))
    assert len(outline.ids) == len(set(outline.ids))
    assert all(address.startswith("#") for address in outline.addresses), "an address outside the page"
    assert {address[1:] for address in outline.addresses} <= set(outline.ids)
    for content in (text, card):
        assert not re.search(
            r"\b(nan|None|inf|null)\b", re.sub(r"<(style|script)>.*?</\1>|>none<", "", content, flags=re.S)
        )
        assert "What may not be concluded" in content and "p (Holm)" in content
        assert "phase-jax evaluate --workdir=" in content and "numpy" in content
    linked = re.findall(r"\]\((report-figures/[^)]*)\)", card)
    assert len(linked) == 10 and all((page.parent / name).is_file() for name in linked)


def test_a_single_report_without_prompts_or_names_makes_a_page(lab_folder, tmp_path):
    report = json.loads((lab_folder / "full_attn_1kv" / "evaluations" / "prefix.json").read_text())
    report |= {"model": HOSTILE, "nll": None, "kv_heads": None, "protocol": '"><i>', "validation_loss": None}
    (tmp_path / "report.json").write_text(json.dumps(report))
    out = tmp_path / "out" / "page.html"
    assert main(["report", str(tmp_path / "report.json"), "--out", str(out)]) == 0
    text = out.read_text()
    assert "<script>alert" not in text and "<i>" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp; | $x_{" in text
    assert r"\<script\>alert(1)\</script\> \& \| $x\_\{" in out.with_suffix(".md").read_text()
    assert "p (Holm)" not in text


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["{tmp}/nowhere"], "nowhere: there is no such file or folder"),
        (["{tmp}"], "is no run folder"),
        (["{lab}", "--out", "{tmp}/page.pdf"], "page.pdf: the page is HTML"),
        (["{lab}", "--out", "{tmp}/folder.html"], "is a folder; name a file in it"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(lab_folder, tmp_path, capsys, monkeypatch, arguments, complaint):
    monkeypatch.chdir(tmp_path)
    if "folder.html" in arguments[-1]:
        (tmp_path / "folder.html").mkdir()
    before = list(tmp_path.iterdir())
    assert main(["report", *(text.format(tmp=tmp_path, lab=lab_folder) for text in arguments)]) == 2
    said = capsys.readouterr().err
    assert complaint in said and said.count("\n") == 1
    assert list(tmp_path.iterdir()) == before


def test_commands_name_every_change_to_the_labs_configuration(tmp_path):
    path = write_run(tmp_path / "run", "full_attn_1kv", protocols=("prefix",), seed=7)
    config = json.loads((path / "config.json").read_text())
    assert overrides(config) == ["--config.seed=7"]
    config["train"]["optimizer"]["learning_rate"] = 0.01
    config["data"]["curriculum"] = [[1.0, 16, 104]]
    assert overrides(config) == [
        "--config.seed=7",
        "--config.data.curriculum=((1.0,16,104),)",
        "--config.train.optimizer.learning_rate=0.01",
    ]


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Headless Chromium that logs its network requests. CI must have it; elsewhere its tests may be skipped."""
    chromium, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if not (chromium and driver):
        assert not os.environ.get("CI"), "CI needs the Debian packages chromium and chromium-driver"
        pytest.skip("no chromium and chromedriver here (Debian packages chromium, chromium-driver)")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    quiet = "disable-gpu disable-quic no-first-run disable-background-networking disable-component-update disable-sync"
    for flag in ["headless", "no-sandbox", *quiet.split(), f"user-data-dir={tmp_path_factory.mktemp('chromium')}"]:
        options.add_argument(f"--{flag}")
    opened = webdriver.Chrome(options, webdriver.ChromeService(driver))
    yield opened
    opened.quit()


def resize(browser, width):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def shown(browser, selector):
    return [element for element in browser.find_elements("css selector", selector) if element.is_displayed()]


def press(browser, selector):
    """Presses a button with the keyboard, and returns what aria-pressed says then."""
    from selenium.webdriver.common.keys import Keys

    button = browser.find_element("css selector", selector)
    button.send_keys(Keys.ENTER)
    return button.get_attribute("aria-pressed")


def test_the_page_in_a_browser(browser, page):
    resize(browser, 1280)
    browser.get(page.as_uri())

    folded, unfolded = 'figure[data-view="folded"]', 'figure[data-view="unfolded"]'
    assert (len(shown(browser, folded)), len(shown(browser, unfolded))) == (2, 4)
    assert press(browser, '[data-value="folded"]') == "true"
    assert (len(shown(browser, folded)), len(shown(browser, unfolded))) == (2, 0)
    assert press(browser, '[data-value="unfolded"]') == "true"
    assert (len(shown(browser, folded)), len(shown(browser, unfolded))) == (0, 4)
    assert browser.find_element("css selector", '[data-value="folded"]').get_attribute("aria-pressed") == "false"
    press(browser, '[data-choose="view"][data-value="all"]')

    rows = "#numbers tr[data-protocol]"
    assert len(shown(browser, rows)) == 8
    assert press(browser, '[data-value="insequence"]') == "true"
    assert len(shown(browser, rows)) == 4 and not shown(browser, 'figure[data-protocol="prefix"]')
    assert (len(shown(browser, folded)), len(shown(browser, unfolded))) == (1, 2)
    press(browser, '[data-choose="protocol"][data-value="all"]')

    def colors():
        return browser.execute_script(
            "return [document.body, document.querySelector('.plot text')].map((x, i) =>"
            " getComputedStyle(x)[i ? 'fill' : 'backgroundColor'])"
        )

    light, pressed = colors(), press(browser, "#theme")
    assert pressed == "true" and all(one != other for one, other in zip(light, colors(), strict=True))
    assert press(browser, "#theme") == "false" and colors() == light

    assert not shown(browser, "figure table")
    press(browser, "figure summary")
    assert len(shown(browser, "figure table")) == 1

    browser.execute_script("document.querySelectorAll('details').forEach((x) => { x.open = true; })")
    for width in (390, 1280):
        resize(browser, width)
        assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth"), f"at {width} px"

    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = [x["params"] for x in events if x["method"] == "Network.requestWillBeSent"]
    # The browser's own start page asks for things, too; those have another document.
    asked = {x["request"]["url"] for x in requests if x["documentURL"].startswith(page.as_uri())}
    assert asked == {page.as_uri()}
    assert not [entry for entry in browser.get_log("browser") if "report.html" in entry["message"]]


def test_the_page_without_scripts(browser, page):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        resize(browser, 390)
        browser.get(page.as_uri())
        assert not shown(browser, ".toolbar") and len(shown(browser, "figure")) == 10
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
