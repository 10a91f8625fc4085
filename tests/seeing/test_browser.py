"""The pictures in a real browser: text fits, boxes lie free, blocks open and close.

Chromium is asked for its own measures of every text and box. Where none is installed, the tests are
skipped and say so.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path

import pytest

from tests.support.seeing_graphs import SHAPES, transformer

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--virtual-time-budget=8000"),
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed to render in"),
]

MEASURE = """
const rect = (e) => { const r = e.getBoundingClientRect(); return [r.x, r.y, r.right, r.bottom]; };
const measure = () => {
  const svg = document.querySelector("svg.gt");
  const boxes = [...svg.querySelectorAll("g.box[data-key]")].map((g) => ({
    key: g.dataset.key, rect: rect(g.querySelector("rect.card")),
    texts: [...g.querySelectorAll("text")].map((t) => [t.textContent, rect(t)]),
  }));
  const frames = [...svg.querySelectorAll("g.frame")].map((g) => ({
    rect: rect(g.querySelector("rect.around")),
    texts: [...g.querySelectorAll("text")].map((t) => [t.textContent, rect(t)]),
  }));
  const heads = [...svg.querySelectorAll("text")].map((t) => [t.textContent, rect(t)]);
  return { boxes, frames, heads, page: rect(svg) };
};
const report = (found) => {
  const out = document.createElement("pre");
  out.id = "found";
  out.textContent = JSON.stringify(found);
  document.body.append(out);
};
"""


def seen(html: str, script: str, tmp_path: Path, width: int = 1600, height: int = 1000):
    """What a script in the page reports."""
    file = tmp_path / "page.html"
    html = html.replace("</body>", f"<script>{MEASURE}{script}</script></body>")
    file.write_text(html, encoding="utf-8")
    command = [
        *(BROWSER, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}"),
        *(f"--window-size={width},{height}", "--dump-dom", file.as_uri()),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert found, done.stderr[-2000:]
    return json.loads(unescape(found[1]))


def is_inside(inner, outer, room: float = 0.0) -> bool:
    low = all(inner[i] >= outer[i] + room for i in (0, 1))
    return low and all(inner[i] <= outer[i] - room for i in (2, 3))


def overlap(a, b) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def check(found) -> None:
    """Text lies in its box, boxes lie apart, names of frames in their frames."""
    boxes = found["boxes"]
    for box in boxes:
        assert box["texts"]
        for text, rect in box["texts"]:
            assert is_inside(rect, box["rect"]), (text, rect, box["rect"])
    for i, one in enumerate(boxes):
        for two in boxes[:i]:
            assert not overlap(one["rect"], two["rect"]), (one["key"], two["key"])
    for frame in found["frames"]:
        for text, rect in frame["texts"]:
            assert is_inside(rect, frame["rect"]), text
            assert not any(overlap(rect, box["rect"]) for box in boxes), text


@pytest.mark.sampled(slow=10)
@pytest.mark.parametrize("name", SHAPES)
def test_text_fits_in_a_real_browser(name, tmp_path):
    svg = SHAPES[name]().to_svg()
    html = f"<!doctype html><meta charset=utf-8><body>{svg}</body>"
    found = seen(html, "report(measure());", tmp_path)
    check(found)
    for text, rect in found["heads"]:
        assert is_inside(rect, found["page"]), text


@pytest.mark.sampled(slow=5)
@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("name", ["transformer", "cuts", "loop", "hostile_names", "square_twice"])
def test_the_page_lays_out_what_python_does(name, width, tmp_path):
    graph = SHAPES[name]()
    found = seen(graph.to_html(), "report(measure());", tmp_path, width)
    check(found)
    keys = re.findall(r'class="box[^"]*" data-key="(\d+)"', graph.to_svg())
    assert sorted(box["key"] for box in found["boxes"]) == sorted(keys)


def test_the_key_of_a_narrow_page_is_not_cut_off(tmp_path):
    script = """
    const words = [...document.querySelectorAll("#key text")];
    report({ key: rect(document.getElementById("key")), width: window.innerWidth,
      words: words.map((t) => [t.textContent, rect(t)]) });
    """
    found = seen(SHAPES["cuts"]().to_html(), script, tmp_path, 500)
    assert len(found["words"]) > 3 and found["key"][2] <= found["width"]
    for word, place in found["words"]:
        assert is_inside(place, found["key"]), word


def test_python_and_the_page_give_the_same_numbers(tmp_path):
    for name in ("transformer", "loop", "interleaved_passes", "random_graph"):
        graph = SHAPES[name]()
        script = (
            "const p = window.gradtools.draft();"
            "report({width: p.width, height: p.height, boxes: p.boxes, paths:"
            " [...document.querySelectorAll('.wire path:first-of-type')].length});"
        )
        found = seen(graph.to_html(), script, tmp_path)
        svg = graph.to_svg()
        places = {
            int(key): (float(x), float(y))
            for key, x, y in re.findall(
                r'<g class="box[^"]*" data-key="(\d+)">(?:<title>[^<]*</title>)?'
                r'(?:<rect class="behind"[^>]*>)?<rect class="card" x="([-\d.]+)" y="([-\d.]+)"',
                svg,
            )
        }
        assert len(places) == len(found["boxes"])
        for box in found["boxes"]:
            x, y = places[box["key"]]
            assert abs(box["x"] - x) < 0.11 and abs(box["y"] - y) < 0.11


def test_every_block_opens_and_closes(tmp_path):
    script = """
    const g = window.gradtools, found = [];
    g.setAll(false); found.push(measure());
    for (let round = 0; round < 4; round++) {
      for (const closed of [...document.querySelectorAll("g.block[role=button]")]) {
        g.toggle(Number(closed.dataset.key));
      }
      found.push(measure());
    }
    g.setAll(true); found.push(measure());
    g.setAll(false); found.push(measure());
    report(found);
    """
    found = seen(transformer(12).to_html(), script, tmp_path)
    for view in found:
        check(view)
    counts = [len(view["boxes"]) for view in found]
    assert counts[0] == counts[-1] < counts[1] < counts[2] <= counts[-2]
    assert counts[-3] == counts[-2]


def test_a_block_opens_by_the_keyboard_and_keeps_the_focus(tmp_path):
    script = """
    const block = document.querySelector("g.block[role=button]");
    const before = document.querySelectorAll("g.box").length;
    block.focus();
    block.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
    const focus = document.activeElement;
    report({ before, after: document.querySelectorAll("g.box").length,
      label: block.getAttribute("aria-label"), expanded: focus.getAttribute("aria-expanded") });
    """
    found = seen(transformer(12).to_html(), script, tmp_path)
    assert found["after"] > found["before"]
    assert found["expanded"] == "true" and "open" in found["label"]


def test_the_search_opens_what_it_finds(tmp_path):
    script = """
    const search = document.getElementById("search");
    search.value = "attention.query.weight";
    search.dispatchEvent(new Event("input"));
    search.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
    report({ status: document.getElementById("status").textContent,
      found: [...document.querySelectorAll(".found text")].map((t) => t.textContent) });
    """
    found = seen(transformer(12).to_html(), script, tmp_path)
    assert found["status"].startswith("1 of 1") and "384×384 float32" in found["found"]


def test_a_page_of_ten_thousand_operations_opens(tmp_path):
    script = "report({boxes: document.querySelectorAll('g.box').length});"
    found = seen(transformer(250, backward=True).to_html(), script, tmp_path)
    assert 10 < found["boxes"] < 60
