"""The benchmark of frozen functions runs, and what it found has every row and keeps its bounds."""

from __future__ import annotations

import importlib
import itertools
import math
import os
import pathlib
import re
import subprocess
import sys

import pytest

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


def test_the_documentation_tells_what_the_examples_printed():
    page = (ROOT / "docs" / "frozen.md").read_text(encoding="utf-8")
    kept = ROOT / "examples" / "printed"
    halves = (kept / "u03_latent_gradients.txt").read_text().split("jax:")
    use = re.compile(r"N = +(\d+): frozen (\S+) MB, double backward (\S+) MB")
    ours, theirs = (use.findall(half) for half in halves)
    assert len(ours) == 4
    for (count, *a), (_, *b) in zip(ours, theirs, strict=True):
        assert f"| {count} | {' | '.join(f'{x} MB' for x in (*a, *b))} |" in page
    depths = re.findall(
        r"(\d+) layers: .* takes (\S+) MB, with double backward (\S+) MB", halves[0]
    )
    assert {a for _, a, _ in depths} == {"0.115"}
    told = "takes 0.115 MB around {} and {} dense layers, where double backward takes {} and {} MB"
    names, _, sizes = ([*column] for column in zip(*depths, strict=True))
    pairs = ((", ".join(xs[:-1]), xs[-1]) for xs in (names, sizes))
    assert told.format(*itertools.chain(*pairs)) in " ".join(page.split())
    text = (kept / "u03_gradient_penalty.txt").read_text()
    penalty = re.findall(r"nothing is gained: (\S+) MB, double backward (\S+) MB", text)
    told = "measures {} MB with `frozen` and {} MB without in PyTorch, {} MB and {} MB in JAX"
    assert told.format(*penalty[0], *penalty[1]) in " ".join(page.split())


@pytest.mark.slow
def test_the_documentation_tells_what_xla_makes_of_it():
    page = " ".join((ROOT / "docs" / "frozen.md").read_text(encoding="utf-8").split())
    lines = printed("frozen_xla.py").splitlines()
    table = [line for line in lines if line.startswith("| layers")]
    assert len(table) == 4
    for line in table:
        assert line in page
    further = re.findall(r"(\d\.\d+ MB)", " ".join(lines[lines.index(table[-1]) + 1 :]))
    assert len(further) == 2
    assert all(size in page for size in further)


def printed(program):
    command = [sys.executable, str(ROOT / "benchmarks" / program), "--quick"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_benchmark_runs():
    check(printed("frozen.py"), ["dense"])


@pytest.mark.slow
def test_the_time_is_measured_over_the_size_of_the_network():
    (row,) = (line for line in printed("frozen_sizes.py").splitlines() if "dense layers" in line)
    assert len([float(x) for x in row.split("|")[2:-1]]) == 5
