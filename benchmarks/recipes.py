"""The memory of the recipes in docs/: the programs of the pages, at their measured sizes.

    python benchmarks/recipes.py            # writes the tables of the pages and results/recipes.md
    python benchmarks/recipes.py laplacian  # measures that page alone

A page's first block of Python names its sizes in a line that ends in `# measured: ...`; this script
puts the measured sizes in their place. Each row is a process of its own: the memory is the highest
of the process during a step over that before it, after compilation in JAX. Time is the processor
time of the step over that of the first way.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "recipes.md"
EITHER = "import gradtools.torch as gt  # or: import gradtools.jax as gt"
MARKS = "<!-- measured: generated -->\n\n", "\n\n<!-- end of measured -->"
HEAD = "| framework | step | memory | time |\n|---|---|---|---|"
Page = dict[str, Any]


def _pairs(page: Page) -> dict[str, tuple[Any, Any, tuple[Any, ...]]]:
    """Of each way the function, its argnums and its arguments."""
    ways = {"all scores at once": "whole", "in chunks": "in_chunks"}
    return {way: (page[name], (0, 1), page["args"]) for way, name in ways.items()}


def _vocabulary(page: Page) -> dict[str, tuple[Any, Any, tuple[Any, ...]]]:
    shared = page["hidden"], page["weight"], page["labels"]
    more = {"cross_entropy": (), "dpo": ("reference",), "grpo": ("reference", "old", "advantage")}
    ways = {"all logits at once": "log_probs", "in chunks": "in_chunks"}
    return {
        f"{loss}, {way}": (
            partial(page[loss], page[name]), (0, 1), (*shared, *[page[x] for x in rest]),
        )
        for loss, rest in more.items()
        for way, name in ways.items()
    }  # fmt: skip


def _laplacian(page: Page) -> dict[str, tuple[Any, Any, tuple[Any, ...]]]:
    ways = {"jacobian(grad(u))": "by_hessian", "hvp, axis by axis": "by_products"}
    return {way: (page["residual"](page[name]), 0, page["args"]) for way, name in ways.items()}


def _meanflow(page: Page) -> dict[str, tuple[Any, Any, tuple[Any, ...]]]:
    def way(wrap: Callable[..., Any]) -> tuple[Any, Any, tuple[Any, ...]]:
        page["torch"].manual_seed(0)
        return page["loss"], 0, (page["Velocity"](wrap), *page["batch"]())

    return {
        "all activations kept": way(lambda block: block),
        "gt.checkpoint": way(page["gt"].checkpoint),
    }


PAGES = {
    "recipes/all-pairs": _pairs,
    "recipes/large-vocabulary": _vocabulary,
    "recipes/laplacian": _laplacian,
    "tutorials/meanflow": _meanflow,
}


def program(name: str, backend: str) -> tuple[str, str]:
    """The page's block for a backend at the measured sizes, and these sizes."""
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    code = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)[0]
    (sizes,) = re.findall(r"^(.*) = .*  # measured: (.*)$", code, re.MULTILINE)
    code = code.replace(EITHER, f"import gradtools.{backend} as gt")
    code = re.sub(r"^(.*) = .*  # measured: (.*)$", r"\1 = \2", code, flags=re.MULTILINE)
    return code, ", ".join(
        f"{word} = {value.replace('_', ',')}"
        for word, value in zip(sizes[0].split(", "), sizes[1].split(", "), strict=True)
    )


# --- one row, in its own process ---------------------------------------------------------------


def kilobytes(field: str) -> int:
    """A figure of this process: VmRSS is its memory now, VmHWM the most since it was reset."""
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field)]
    return int(line.split()[1])


def measured(name: str, backend: str, way: str) -> dict[str, float]:
    code, _ = program(name, backend)
    page: Page = {"__name__": "page"}
    exec(compile(code, name, "exec"), page)
    f, argnums, args = PAGES[name](page)[way]
    step = page["gt"].value_and_grad(f, argnums)
    run: Callable[[], Any] = partial(step, *args)
    if backend == "jax":
        import jax

        compiled = jax.jit(step).lower(*args).compile()
        run = lambda: jax.block_until_ready(compiled(*args))
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, start = kilobytes("VmRSS"), time.process_time()
    value, _ = run()
    return {
        "megabytes": (kilobytes("VmHWM") - before) / 1e3,
        "seconds": time.process_time() - start,
        "value": float(value),
    }


def apart(*row: str) -> dict[str, float]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # every large array is returned to the system when it is freed
    env = {**os.environ, **threads, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, "--row", *row]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{row}: {done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


# --- the tables --------------------------------------------------------------------------------


def table(name: str) -> Iterator[str]:
    yield HEAD
    for backend, shown in BACKENDS.items():
        if backend == "jax" and name == "tutorials/meanflow":  # the block is PyTorch's
            continue
        first: dict[str, float] = {}
        for k, way in enumerate(WAYS[name]):
            found = apart(name, backend, way)
            if k % 2 == 0:
                first = found
            if abs(found["value"] - first["value"]) > 1e-3 * abs(first["value"]):
                raise RuntimeError(f"{name}, {backend}, {way}: {found} for {first}")
            ratio = found["seconds"] / first["seconds"]
            yield f"| {shown} | {way} | {found['megabytes']:,.0f} MB | {ratio:.2f} |"


BACKENDS = {"torch": "PyTorch", "jax": "JAX"}
_LOSSES = ("cross_entropy", "dpo", "grpo")
WAYS = {
    "recipes/all-pairs": ["all scores at once", "in chunks"],
    "recipes/large-vocabulary": [
        f"{loss}, {way}" for loss in _LOSSES for way in ("all logits at once", "in chunks")
    ],
    "recipes/laplacian": ["jacobian(grad(u))", "hvp, axis by axis"],
    "tutorials/meanflow": ["all activations kept", "gt.checkpoint"],
}


def section(name: str) -> str:
    """What the page shows between its two marks."""
    return "\n".join([f"With {program(name, 'torch')[1]}:", "", *table(name)])


def main() -> None:
    if sys.argv[1:2] == ["--row"]:
        print(json.dumps(measured(*sys.argv[2:])))
        return
    wanted = sys.argv[1:]
    sections = {
        name: section(name) for name in PAGES if not wanted or name.partition("/")[2] in wanted
    }
    for name, found in sections.items():
        print(f"{name}\n\n{found}\n")
        page = ROOT / "docs" / f"{name}.md"
        text = page.read_text(encoding="utf-8")
        head, _, rest = text.partition(MARKS[0])
        page.write_text(head + MARKS[0] + found + MARKS[1] + rest.partition(MARKS[1])[2])
    frameworks = ", ".join(f"{name} {version(name)}" for name in ("torch", "jax"))
    lines = [
        f"# Memory of the recipes, {datetime.date.today()}, {frameworks}",
        "",
        "The highest memory of the process during a step, value and gradient in float32 on one "
        "thread, over that before it. Time is processor time over that of the first way.",
    ]
    for name in PAGES:
        text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        found = text.partition(MARKS[0])[2].partition(MARKS[1])[0]
        lines += ["", f"## {name.partition('/')[2]}", "", found]
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
