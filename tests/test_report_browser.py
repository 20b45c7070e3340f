"""The page in headless Chromium: no console errors, sorting and hiding, light and dark.

Without a browser this is skipped, except in CI, where the browser is part of the environment.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import matplotlib.image
import pytest

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


def methods(table):
    return [row[1] for row in table[1:]]


def test_opens_without_console_messages(chromium, page):
    dom, messages = chromium(page.as_uri(), "--dump-dom")
    assert messages == []
    shown = read(dom)
    assert {"problems", "s1-endpoints", "s1-paired", "s1-times"} <= set(shown.tables)
    assert shown.tags["svg"] >= 6
    assert shown.tags["input"] == 3 + 1  # a box a method, and a slider
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
    assert dom.count('type="range"') == 1
    assert "update 2000 of 2000" in dom
    move = """<script>
      const slider = document.querySelector(".states input");
      slider.value = "0";
      slider.dispatchEvent(new Event("input"));
    </script></body>"""
    copy = tmp_path / "moved.html"
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", move), encoding="utf-8")
    dom, messages = chromium(copy.as_uri(), "--dump-dom")
    assert messages == []
    assert 'aria-valuetext="update 500 of 2000"' in dom
    group = re.search(r'<g[^>]*data-states="(\w+) [^"]*"[^>]*>(.*?)</g>', dom, re.DOTALL)
    assert group is not None
    fills = re.findall(r"fill: rgb\((\d+), (\d+), (\d+)\)", group[2])
    assert "".join(f"{int(part):02x}" for fill in fills for part in fill) == group[1]


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
