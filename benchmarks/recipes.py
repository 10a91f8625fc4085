"""Measures the memory and time of the programs in the recipes of docs/, at larger sizes.

    python benchmarks/recipes.py            # writes the tables of the pages and results/recipes.md
    python benchmarks/recipes.py laplacian  # measures only this page

The programs of a page set their sizes in a line that ends in `# measured: ...`; this script
replaces these sizes with the sizes in the comment. Each row runs in a separate process. The memory
is the peak memory of the process during a step minus the memory before the step, after compilation
in JAX. Methods are compared in pairs; time is the CPU time relative to the first method of the
pair.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "recipes.md"
EITHER = "import gradtools.torch as gt  # or: import gradtools.jax as gt"
MARKS = "<!-- measured: generated -->\n\n", "\n\n<!-- end of measured -->"
SIZES = re.compile(r"^(.*) = .*  # measured: (.*)$", re.MULTILINE)
HEAD = "| framework | step | memory | time |\n|---|---|---|---|"
Page = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """A method that computes the training step of a page.

    Attributes:
        step: Maps the program's namespace to the step and its arguments.
        block: The index of the program among the page's programs with measured sizes.
    """

    step: Callable[[Page], tuple[Callable[..., Any], tuple[Any, ...]]]
    block: int = 0


def gradient(function: Callable[[Page], Any], argnums: Any, args: Callable[[Page], Any]) -> Any:
    """Returns a function from a page's namespace to a value-and-gradient step and its arguments."""
    return lambda page: (page["gt"].value_and_grad(function(page), argnums), tuple(args(page)))


def named(*names: str) -> Callable[[Page], list[Any]]:
    return lambda page: [page[name] for name in names]


def _pairs() -> Iterator[tuple[str, Way]]:
    for way, name in {"all scores at once": "whole", "in chunks": "in_chunks"}.items():
        yield way, Way(gradient(itemgetter(name), (0, 1), itemgetter("args")))


def _vocabulary() -> Iterator[tuple[str, Way]]:
    more = {"cross_entropy": (), "dpo": ("reference",), "grpo": ("reference", "old", "advantage")}
    for loss, rest in more.items():
        for way, name in {"all logits at once": "log_probs", "in chunks": "in_chunks"}.items():
            function = lambda page, loss=loss, name=name: partial(page[loss], page[name])
            args = named("hidden", "weight", "labels", *rest)
            yield f"{loss}, {way}", Way(gradient(function, (0, 1), args))


def _laplacian() -> Iterator[tuple[str, Way]]:
    ways = {"jacobian(grad(u))": "by_hessian", "hvp, axis by axis": "by_products"}
    for way, name in ways.items():
        function = lambda page, name=name: page["residual"](page[name])
        yield way, Way(gradient(function, 0, itemgetter("args")))


def _meanflow() -> Iterator[tuple[str, Way]]:
    def args(checkpointed: bool, page: Page) -> tuple[Any, ...]:
        page["torch"].manual_seed(0)
        wrap = page["gt"].checkpoint if checkpointed else lambda block: block
        return page["Velocity"](wrap), *page["batch"]()

    yield "all activations kept", Way(gradient(itemgetter("loss"), 0, partial(args, False)))
    yield "gt.checkpoint", Way(gradient(itemgetter("loss"), 0, partial(args, True)))


def _implicit() -> Iterator[tuple[str, Way]]:
    for k, way in enumerate(["implicit_solution", "through all iterations"]):
        function = lambda page, k=k: page["losses"][k]
        yield way, Way(gradient(function, (0, 1), named("w", "x")))


def _curvature() -> Iterator[tuple[str, Way]]:
    yield "hvp of the KL divergence", Way(lambda page: (page["by_kl"], (page["v"],)))
    yield "fisher, by pushforward and pullback", Way(lambda page: (page["fisher"], (page["v"],)))


def _several() -> Iterator[tuple[str, Way]]:
    def apart(page: Page) -> Any:
        gt, losses = page["gt"], page["losses"]
        each = [gt.grad(lambda w, k=k: losses(w)[k]) for k in range(page["tasks"])]
        return lambda shared: gt.xp.stack([g(shared) for g in each]), (page["shared"],)

    yield "tasks, one evaluation for each", Way(apart)
    rows = lambda page: (
        page["gt"].jacobian(page["losses"], chunk_size=1),
        (page["shared"],),
    )
    yield "tasks, jacobian of the losses", Way(rows)
    players = lambda name, page: (page[name], (page["g"], page["d"]))
    yield "players, two evaluations", Way(partial(players, "by_two_evaluations"), 1)
    yield "players, one evaluation", Way(partial(players, "by_one_evaluation"), 1)


def _per_example() -> Iterator[tuple[str, Way]]:
    for way, name in {"all activations kept": "kept", "gt.checkpoint": "again"}.items():
        yield way, Way(lambda page, name=name: (page[name], (page["layers"], page["x"], page["y"])))


def _unlike() -> Iterator[tuple[str, Way]]:
    for way, name in {"all activations kept": "encode", "gt.checkpoint": "again"}.items():
        function = lambda page, name=name: lambda w: page["loss"](w, page[name])
        yield way, Way(gradient(function, 0, named("w")))


def _tokens() -> Iterator[tuple[str, Way]]:
    given = named("net", "x", "tokens")
    yield "the whole batch", Way(lambda page: (page["gt"].grad(page["loss"]), tuple(given(page))))
    yield "in six steps", Way(lambda page: (page["in_steps"], tuple(given(page))))


def _hogwild() -> Iterator[tuple[str, Way]]:
    for count in (1, 4):
        name = f"400 updates by {count} thread{'s' * (count > 1)}"
        yield name, Way(lambda page, count=count: (page["train"], (count,)))


PAGES: dict[str, dict[str, Way]] = {
    "recipes/all-pairs": dict(_pairs()),
    "recipes/large-vocabulary": dict(_vocabulary()),
    "recipes/laplacian": dict(_laplacian()),
    "recipes/implicit-layers": dict(_implicit()),
    "recipes/curvature-products": dict(_curvature()),
    "recipes/several-losses": dict(_several()),
    "recipes/token-means": dict(_tokens()),
    "tutorials/meanflow": dict(_meanflow()),
    "tutorials/dp-sgd": dict(_per_example()),
    "chunked": dict(_unlike()),
    "grad-or-backward": dict(_hogwild()),
}
RANDOM = ("grad-or-backward",)  # results depend on the order of threads


def programs(name: str) -> list[str]:
    """Returns the Python blocks of the page that contain a line with measured sizes."""
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    found: list[str] = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [code for code in found if SIZES.search(code)]


def program(code: str, backend: str) -> str:
    """Returns a block for a backend, with the measured sizes."""
    return SIZES.sub(r"\1 = \2", code.replace(EITHER, f"import gradtools.{backend} as gt"))


def sizes(code: str) -> str:
    """Returns the measured sizes of a block as text."""
    names, values = [part.split(", ") for part in SIZES.findall(code)[0]]
    pairs = zip(names, values, strict=True)
    return ", ".join(f"{word} = {value.replace('_', ',')}" for word, value in pairs)


# --- one row, in a separate process ------------------------------------------------------------


def kilobytes(field: str) -> int:
    """Returns a memory figure of this process in kilobytes.

    VmRSS is the current memory, and VmHWM is the peak memory since a reset.
    """
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field)]
    return int(line.split()[1])


def arrays(result: Any) -> Iterator[Any]:
    """Yields all arrays in nested containers."""
    if isinstance(result, dict | list | tuple):
        for x in result.values() if isinstance(result, dict) else result:
            yield from arrays(x)
    else:
        yield result


def measured(name: str, backend: str, way: str) -> dict[str, float]:
    found = PAGES[name][way]
    page: Page = {"__name__": "page"}
    exec(compile(program(programs(name)[found.block], backend), name, "exec"), page)
    step, args = found.step(page)
    run: Callable[[], Any] = partial(step, *args)
    if backend == "jax":
        import jax

        compiled = jax.jit(step).lower(*args).compile()
        run = lambda: jax.block_until_ready(compiled(*args))
    else:
        run()  # the first call imports modules
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, start = kilobytes("VmRSS"), time.process_time()
    result = run()
    used = {
        "megabytes": (kilobytes("VmHWM") - before) / 1e3,
        "seconds": time.process_time() - start,
    }
    return used | {"value": sum(float(abs(x).sum()) for x in arrays(result))}


def apart(*row: str) -> dict[str, float]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    # the memory of a large array is returned to the system when the array is freed
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
        if backend == "jax" and EITHER not in programs(name)[0]:  # only in PyTorch
            continue
        first: dict[str, float] = {}
        for k, way in enumerate(PAGES[name]):
            found = apart(name, backend, way)
            if k % 2 == 0:
                first = found
            away = abs(found["value"] - first["value"]) > 1e-3 * abs(first["value"])
            if away and name not in RANDOM:
                raise RuntimeError(f"{name}, {backend}, {way}: got {found}, expected {first}")
            ratio = found["seconds"] / first["seconds"]
            yield f"| {shown} | {way} | {found['megabytes']:,.0f} MB | {ratio:.2f} |"


BACKENDS = {"torch": "PyTorch", "jax": "JAX"}


def section(name: str) -> str:
    """Returns the text between the two marks of the page."""
    return "\n".join([f"With {'; '.join(map(sizes, programs(name)))}:", "", *table(name)])


def main() -> None:
    if sys.argv[1:2] == ["--row"]:
        print(json.dumps(measured(*sys.argv[2:])))
        return
    wanted = sys.argv[1:]
    sections = {
        name: section(name) for name in PAGES if not wanted or name.rpartition("/")[2] in wanted
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
        "The memory is the peak memory of the process during a step (value and gradient in float32 "
        "on one thread) minus the memory before the step. Methods are compared in pairs; time is "
        "the CPU time relative to the first method of the pair.",
    ]
    for name in PAGES:
        text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
        found = text.partition(MARKS[0])[2].partition(MARKS[1])[0]
        lines += ["", f"## {name.rpartition('/')[2]}", "", found]
    RESULTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
