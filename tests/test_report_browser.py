"""The page in headless Chromium: no console errors, sorting and hiding, light and dark, phone, print, axe.

Without a browser this is skipped, except in CI, where the browser is part of the environment.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import matplotlib.image
import pytest
from filelock import FileLock

from gar.report import write
from gar.report.results import load
from support.made_up_runs import write_run
from support.pages import read

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None
)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
FLAGS += ["--enable-logging=stderr", "--window-size=1200,1600", "--virtual-time-budget=5000"]
DARK = "--blink-settings=preferredColorScheme=0"
AXE = "4.14.1"
KEPT = Path(__file__).parents[1] / "build" / f"axe-core-{AXE}.min.js"


@pytest.fixture
def chromium(tmp_path):
    if BROWSER is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("no Chromium on this machine")

    def run(url, *options):
        profile = tmp_path / f"profile-{len(list(tmp_path.iterdir()))}"
        command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", *options, url]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=True, encoding="utf-8"
        )
        return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return run


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    root = tmp_path_factory.mktemp("page")
    for method, levels in (("baseline", (0.60, 0.62)), ("gar", (0.66, 0.65)), ("cagrad", (0.58, 0.59))):
        for seed, accuracy in enumerate(levels):
            write_run(root / "runs", method, seed, accuracy=accuracy, evaluations=(500, 1000))
    write_run(root / "runs", "gar", 7, state="failed")
    return write(load(root / "runs"), root / "report")["report.html"]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Two mixtures, and a method with two coefficients."""
    root = tmp_path_factory.mktemp("sweep")
    for mixture, level in (("five", 0.6), ("six", 0.7)):
        for seed in range(3):
            write_run(root / "runs", "baseline", seed, mixture, accuracy=level + seed / 100)
            for shift, coefficient in ((0.02, 1e-3), (0.01, 1e-2)):
                fields = {"coefficient": coefficient}
                accuracy = level + seed / 100 + shift + seed**2 / 1000
                write_run(root / "runs", "gar", seed, mixture, accuracy=accuracy, fields=fields,
                          evaluations=(500, 1000))  # fmt: skip
    return write(load(root / "runs"), root / "report")["report.html"]


@pytest.fixture(scope="session")
def axe(tmp_path_factory):
    """The script of axe-core: kept in build/, or from npm; without both the test is skipped."""
    with FileLock(tmp_path_factory.getbasetemp().parent / "axe.lock"):
        if not KEPT.is_file():
            npm, into = shutil.which("npm"), tmp_path_factory.mktemp("axe")
            if npm is None:
                pytest.skip("no npm to get axe-core with")
            command = [npm, "pack", f"axe-core@{AXE}", "--silent"]
            try:
                subprocess.run(command, cwd=into, check=True, capture_output=True, timeout=60)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                pytest.skip(f"npm cannot get axe-core ({type(error).__name__})")
            with tarfile.open(into / f"axe-core-{AXE}.tgz") as packed:
                script = packed.extractfile("package/axe.min.js")
                assert script is not None
                KEPT.parent.mkdir(exist_ok=True)
                KEPT.write_bytes(script.read())
    return KEPT.read_text(encoding="utf-8")


def inside(page, folder, script, width=1200, fragment=""):
    """A page that shows ``page`` at this width, runs ``script`` in it, and keeps what that posts."""
    text = page.read_text(encoding="utf-8")
    (folder / "inner.html").write_text(
        text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8"
    )
    outer = folder / "outer.html"
    outer.write_text(
        f"""<iframe src="inner.html{fragment}" style="width:{width}px;height:1500px;border:0"></iframe>
        <script>addEventListener("message", (event) => {{
          const told = document.createElement("pre");
          told.id = "told";
          told.textContent = event.data;
          document.body.append(told);
        }});</script>""",
        encoding="utf-8",
    )
    return outer


def told(dom):
    """What was posted."""
    found = re.search(r'<pre id="told">(.*?)</pre>', dom, re.DOTALL)
    assert found, dom[-2000:]
    return json.loads(html.unescape(found[1]))


def methods(table):
    return [row[1] for row in table[1:]]


def test_opens_without_console_messages(chromium, page):
    dom, messages = chromium(page.as_uri(), "--dump-dom")
    assert messages == []
    shown = read(dom)
    assert {"problems", "s1-endpoints", "s1-paired", "s1-times"} <= set(shown.tables)
    assert shown.tags["svg"] >= 6
    assert shown.tags["input"] == 3 + 2  # a box a method; two sliders
    assert methods(shown.tables["s1-endpoints"]) == ["Baseline", "CAGrad", "GAR"]


def test_console_messages_would_be_seen(chromium, tmp_path):
    broken = tmp_path / "broken.html"
    broken.write_text("<script>throw new Error('on purpose')</script>", encoding="utf-8")
    _, messages = chromium(broken.as_uri(), "--dump-dom")
    assert any("on purpose" in line for line in messages)


def test_sorting_and_hiding_by_address(chromium, page):
    dom, messages = chromium(f"{page.as_uri()}#sort=s1-endpoints:3:desc&hide=cagrad", "--dump-dom")
    assert messages == []
    assert methods(read(dom).tables["s1-endpoints"]) == ["GAR", "Baseline", "CAGrad"]
    assert 'aria-sort="descending"' in dom
    rows = re.findall(r'<tr class="([^"]*)" data-variant="([^"]*)"', dom)
    assert {variants for classes, variants in rows if "hidden" in classes.split()} == {
        "cagrad",
        "cagrad baseline",
        "gar cagrad",
    }
    assert all(
        "hidden" in g for g in re.findall(r'<g class="series[^>]*data-variant="[^"]*cagrad[^>]*>', dom)
    )
    dom, _ = chromium(f"{page.as_uri()}#sort=s1-endpoints:3:asc", "--dump-dom")
    assert methods(read(dom).tables["s1-endpoints"]) == ["CAGrad", "Baseline", "GAR"]


def test_sorting_by_click(chromium, page, tmp_path):
    clicks = """<script>
      const head = document.querySelectorAll("#s1-endpoints thead button")[3];
      head.click(); head.click();
    </script></body>"""
    copy = tmp_path / "clicked.html"
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", clicks), encoding="utf-8")
    dom, messages = chromium(copy.as_uri(), "--dump-dom")
    assert messages == []
    assert methods(read(dom).tables["s1-endpoints"]) == ["CAGrad", "Baseline", "GAR"]
    assert 'aria-sort="ascending"' in dom


def test_slider_shows_earlier_states(chromium, page, tmp_path):
    """The keys of a range input are the browser's; what it shows is ours."""
    dom, _ = chromium(page.as_uri(), "--dump-dom")
    assert dom.count('type="range"') == 2
    assert dom.count("update 2000 of 2000</output>") == 2
    move = """<script>
      document.querySelectorAll(".states input").forEach((slider) => {
        slider.value = "0";
        slider.dispatchEvent(new Event("input"));
      });
    </script></body>"""
    copy = tmp_path / "moved.html"
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", move), encoding="utf-8")
    dom, messages = chromium(copy.as_uri(), "--dump-dom")
    assert messages == []
    assert dom.count('aria-valuetext="update 500 of 2000"') == 2
    for name in ("s1-heatmap-0", "s1-conflict-0"):
        figure = re.search(rf'<figure id="{name}">.*?</figure>', dom, re.DOTALL)
        assert figure is not None
        group = re.search(r'<g[^>]*data-states="(\w+) [^"]*"[^>]*>(.*?)</g>', figure[0], re.DOTALL)
        assert group is not None
        fills = re.findall(r"fill: rgb\((\d+), (\d+), (\d+)\)", group[2])
        assert "".join(f"{int(part):02x}" for fill in fills for part in fill) == group[1]
    words = re.findall(r'data-words="([^|"]+)\|[^"]*"[^>]*><text[^>]*>([^<]*)<', dom)
    assert len(words) > 5
    assert all(first == shown for first, shown in words)


def test_a_phone_scrolls_no_figure(chromium, page, tmp_path):
    """In 400 pixels every figure fits, at its natural size."""
    (tmp_path / "page.html").write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    frame = tmp_path / "phone.html"
    frame.write_text(
        """<iframe src="page.html" style="width:400px;height:900px;border:0"></iframe><pre></pre><script>
        document.querySelector("iframe").onload = (event) => {
          const inside = event.target.contentDocument;
          const widths = [...inside.querySelectorAll(".panels")].map((box) => {
            const scale = [...box.querySelectorAll("svg")].map(
              (svg) => svg.getBoundingClientRect().width / svg.viewBox.baseVal.width * 72 / 96);
            return `${box.scrollWidth <= box.clientWidth} ${Math.min(...scale).toFixed(1)}`;
          });
          document.querySelector("pre").textContent = widths.join("|");
        };</script>""",
        encoding="utf-8",
    )
    dom, _ = chromium(frame.as_uri(), "--dump-dom", "--allow-file-access-from-files")
    told = re.search(r"<pre>(.*?)</pre>", dom)
    assert told is not None
    assert set(told[1].split("|")) == {"true 1.0"}


def test_screenshots_light_and_dark(chromium, page, tmp_path):
    pictures = {}
    for name, options in (("light", []), ("dark", [DARK])):
        file = tmp_path / f"{name}.png"
        chromium(page.as_uri(), f"--screenshot={file}", *options)
        pictures[name] = matplotlib.image.imread(file)[..., :3]
    assert pictures["light"].shape == (1600, 1200, 3)
    assert pictures["light"].mean() > 0.85  # mostly page, with something on it
    assert pictures["dark"].mean() < 0.25
    assert pictures["light"].std() > 0.05
    assert pictures["dark"].std() > 0.05


def test_prints(chromium, page, tmp_path):
    file = tmp_path / "page.pdf"
    chromium(page.as_uri(), f"--print-to-pdf={file}", "--no-pdf-header-footer")
    assert file.read_bytes().startswith(b"%PDF")


def test_a_link_of_the_contents_keeps_sort_and_hide(chromium, page, tmp_path):
    script = """
      document.querySelector('nav a[href="#s1-head-gains"]').click();
      parent.postMessage(JSON.stringify({hash: location.hash, top: Math.round(
        document.getElementById("s1-head-gains").getBoundingClientRect().top)}), "*");"""
    state = "sort=s1-endpoints:3:desc&hide=cagrad"
    outer = inside(page, tmp_path, script, fragment=f"#{state}")
    dom, _ = chromium(outer.as_uri(), "--dump-dom")
    assert told(dom)["hash"] == f"#s1-head-gains&{state}"
    assert abs(told(dom)["top"]) <= 1
    dom, _ = chromium(f"{page.as_uri()}#s1-head-gains&{state}", "--dump-dom")  # and it is read again
    assert methods(read(dom).tables["s1-endpoints"]) == ["GAR", "Baseline", "CAGrad"]


def test_hiding_reaches_panels_rows_labels_and_legends(chromium, sweep, tmp_path):
    dom, messages = chromium(f"{sweep.as_uri()}#hide=gar-0-01", "--dump-dom")
    assert messages == []
    groups = re.findall(r'<g class="([^"]*)" data-variant="([^"]*)"', dom)
    assert {v for classes, v in groups if "hidden" in classes} == {
        "gar-0-01", "gar-0-01 baseline",
    }  # fmt: skip
    assert {v for classes, v in groups if "hidden" not in classes} == {
        "gar-0-001", "baseline", "gar-0-001 baseline",
    }  # fmt: skip
    for name in ("s1-loads-0", "s1-steps", "s1-gains", "s1-balance"):
        figure = re.search(rf'<figure id="{name}">.*?</figure>', dom, re.DOTALL)
        assert figure
        assert 'series hidden" data-variant="gar-0-01' in figure[0], name
    script = """
      document.querySelectorAll("details").forEach((details) => { details.open = true; });
      const seen = (text) => [...document.querySelectorAll("figure text")].filter((element) =>
        element.getClientRects().length && element.textContent.includes(text)).length;
      parent.postMessage(JSON.stringify([seen("GAR λ=0.01"), seen("GAR λ=0.001")]), "*");"""
    outer = inside(sweep, tmp_path, script, fragment="#hide=gar-0-01")
    hidden, kept = told(chromium(outer.as_uri(), "--dump-dom")[0])
    assert hidden == 0
    assert kept > 5


def test_a_hidden_panel_leaves_no_gap(chromium, sweep):
    dom, _ = chromium(f"{sweep.as_uri()}#hide=baseline", "--dump-dom")
    figure = re.search(r'<figure id="s1-heatmap-0">.*?</figure>', dom, re.DOTALL)
    assert figure
    panels = re.findall(r"<svg [^>]*>", figure[0])
    assert ['class="hidden"' in panel for panel in panels[:4]] == [
        True,
        True,
        False,
        False,
    ]  # a row of two each


def test_hiding_everything_leaves_no_empty_table(chromium, sweep):
    dom, _ = chromium(f"{sweep.as_uri()}#hide=gar-0-01,gar-0-001,baseline", "--dump-dom")
    tables = re.findall(r'<div class="table( hidden)?">\s*<div[^>]*>\s*<table id="([^"]*)"', dom)
    folded = re.findall(r'<details class="hidden".*?<table id="([^"]*)"', dom, re.DOTALL)
    assert {name: hidden for hidden, name in tables}["s1-opening"] == " hidden"
    assert "s1-paired" in folded


def test_sorting_stays_within_mixtures(chromium, sweep):
    for column, direction in ((3, "desc"), (0, "desc")):
        dom, _ = chromium(f"{sweep.as_uri()}#sort=s1-endpoints:{column}:{direction}", "--dump-dom")
        rows = [row[:4] for row in read(dom).tables["s1-endpoints"][1:]]
        blocks = [row[0] for row in rows[::3]]
        assert [row[0] for row in rows] == [name for name in blocks for _ in range(3)]
        if column:
            assert blocks == ["five", "six", "mean of 2 mixtures"]
            for at in range(0, 9, 3):
                accuracies = [float(row[3]) for row in rows[at : at + 3]]
                assert accuracies == sorted(accuracies, reverse=True)
        else:
            assert blocks == ["six", "mean of 2 mixtures", "five"]


def test_print_opens_what_is_folded(chromium, sweep, tmp_path):
    script = """
      const count = () => document.querySelectorAll("details:not([open])").length;
      const before = count();
      dispatchEvent(new Event("beforeprint"));
      const printed = count();
      dispatchEvent(new Event("afterprint"));
      parent.postMessage(JSON.stringify([before, printed, count()]), "*");"""
    dom, _ = chromium(inside(sweep, tmp_path, script).as_uri(), "--dump-dom")
    before, printed, after = told(dom)
    assert before == after > 5
    assert printed == 0


@pytest.mark.parametrize(("width", "options"), [(1200, []), (1200, [DARK]), (400, [])])
def test_axe_finds_nothing_serious(chromium, sweep, axe, tmp_path, width, options):
    script = (
        axe
        + """;
      document.querySelectorAll("details").forEach((details) => { details.open = true; });
      axe.run().then((found) => parent.postMessage(JSON.stringify(found.violations.map((each) => [
        each.impact, each.id, each.nodes.slice(0, 3).map((node) => node.html.slice(0, 200))])), "*"));"""
    )
    outer = inside(sweep, tmp_path, script, width)
    dom, _ = chromium(outer.as_uri(), "--dump-dom", "--virtual-time-budget=60000", *options)
    found = told(dom)
    assert [each for each in found if each[0] in ("serious", "critical")] == []


def test_axe_would_find_something(chromium, axe, tmp_path):
    broken = tmp_path / "broken.html"
    broken.write_text(
        '<html lang="en"><title>x</title><body><img src="data:,"></body></html>', encoding="utf-8"
    )
    script = (
        axe
        + """;axe.run().then((found) => parent.postMessage(
      JSON.stringify(found.violations.map((each) => each.id)), "*"));"""
    )
    dom, _ = chromium(inside(broken, tmp_path, script).as_uri(), "--dump-dom", "--virtual-time-budget=60000")
    assert "image-alt" in told(dom)


def test_no_column_is_out_of_reach_on_a_phone(chromium, sweep, tmp_path):
    """The page itself does not scroll sideways; what is wider than the screen scrolls in its own box."""
    script = """
      document.querySelectorAll("details").forEach((details) => { details.open = true; });
      const wide = [...document.querySelectorAll(".table table")].filter((table) =>
        table.scrollWidth > table.closest(".scroll").clientWidth + 1);
      const cut = wide.filter((table) => getComputedStyle(table.closest(".scroll")).overflowX !== "auto");
      parent.postMessage(JSON.stringify([document.documentElement.scrollWidth, innerWidth, cut.length,
        wide.map((table) => table.id)]), "*");"""
    dom, _ = chromium(inside(sweep, tmp_path, script, 400).as_uri(), "--dump-dom")
    width, inner, cut, wide = told(dom)
    assert inner == 400
    assert width <= inner
    assert cut == 0
    assert "s1-opening" not in wide  # the one table fits
