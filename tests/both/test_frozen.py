"""What the benchmark of frozen functions found has every row and keeps its bounds."""

from __future__ import annotations

import importlib
import math
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LARGEST = 1.34  # of frozen's work over double backward's
MODELS = ["dense", "convolutional", "transformer"]
CHECKPOINT = {"PyTorch": "torch.utils.checkpoint", "JAX": "jax.checkpoint"}
OURS, PLAIN = "gt.frozen", "double backward"
SECTIONS = {  # and how many columns each has
    "Work for each use": 4,
    "Peak MB over the number of uses": 4,
    "Time": 3,
    "Depth: work for each use": 3,
    "Depth: peak MB": 3,
    "Depth: time": 3,
}


def rows(text, title):
    """The cells of each way under a title: {(framework, G, way): numbers}."""
    section = text.split(f"## {title}")[1].split("##")[0]
    lines = re.findall(r"^\| (\w+) \| (\w+) \| ([^|]+) \| (.*) \|$", section, re.M)
    found = {tuple(names): values.split(" | ") for *names, values in lines}
    number = lambda x: math.nan if x == "–" else float(x)
    return {k: [number(x) for x in v] for k, v in found.items() if k[0] != "framework"}


def check(text, models):
    work = rows(text, "Work")
    assert {(framework, model) for framework, model, _ in work} == {
        (framework, model) for framework in ("PyTorch", "JAX") for model in models
    }
    for framework, model, way in work:
        plain = work[framework, model, "double backward"][0]
        if way == "gt.frozen":
            assert 1 < work[framework, model, way][0] / plain <= LARGEST


def test_the_results_have_every_row():
    text = (RESULTS / "frozen.md").read_text()
    assert re.match(r"# Second .*, \d{4}-\d\d-\d\d, Python 3\S+, torch \S+, jax \S+\n", text)
    ways = (PLAIN, "forward over reverse by hand", OURS)
    expected = {
        (framework, model, way)
        for framework, theirs in CHECKPOINT.items()
        for model in MODELS
        for way in (*ways, theirs)
    }
    for title, columns in SECTIONS.items():
        found = rows(text, title)
        assert set(found) == expected, title
        for values in found.values():
            assert len(values) == columns and all(x > 0 for x in values), title
    assert "</svg>" in (RESULTS / "frozen.svg").read_text()


def test_the_results_keep_the_bounds_of_work_and_bytes():
    text = (RESULTS / "frozen.md").read_text()
    check(text, MODELS)
    peaks = rows(text, "Peak MB over the number of uses")
    for framework in CHECKPOINT:
        for model in MODELS:
            pair = (peaks[framework, model, way] for way in (OURS, PLAIN))
            ours, plain = ([x for x in values if x > 0] for values in pair)
            assert ours[-1] - ours[-2] < (plain[-1] - plain[-2]) / 2


def test_the_documentation_tells_what_each_network_took(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    figures = importlib.import_module("figures")
    page = figures.FROZEN.read_text(encoding="utf-8")
    assert figures.parts(page)[1] == figures.table(figures.FROZEN), "python benchmarks/figures.py"
    text = (RESULTS / "frozen.md").read_text()
    found = [rows(text, title) for title in ("Time", "Depth: time")]
    for framework in CHECKPOINT:
        for model in MODELS:
            times = [x for table in found for x in table[framework, model, OURS]]
            told = f"| {model} {framework} | " in page and f" to {max(times):.2f} | " in page
            assert len(times) == 6 and told
