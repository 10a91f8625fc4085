"""Compares the times of `why_zero` and of a forward pass, for a transformer of twelve layers.

Each row is measured in a new process. The program measures the first call of `why_zero` and the
median of later calls, and measures the forward pass in the same way. The loss "dead" is clipped to
a constant, so no leaf has a gradient, and `why_zero` reports the cause.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np

LAYERS, BATCH, LENGTH, WIDTH, HEADS, LATER = 12, 8, 64, 128, 4, 3
ROOT = pathlib.Path(__file__).parent.parent
SIZES = {
    "query": (WIDTH, WIDTH),
    "key": (WIDTH, WIDTH),
    "value": (WIDTH, WIDTH),
    "out": (WIDTH, WIDTH),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
    "up_bias": (4 * WIDTH,),
    "down_bias": (WIDTH,),
    "scale": (WIDTH,),
    "shift": (WIDTH,),
    "scale_2": (WIDTH,),
    "shift_2": (WIDTH,),
}


def leaves(gt: Any) -> tuple[Any, Any]:
    """Returns the parameters (144 arrays) and one batch."""
    rng = np.random.default_rng(0)
    new = lambda *shape: gt.asarray((rng.normal(size=shape) / shape[0] ** 0.5).astype(np.float32))
    params = [{name: new(*shape) for name, shape in SIZES.items()} for _ in range(LAYERS)]
    return params, new(BATCH, LENGTH, WIDTH)


def transformer(gt: Any) -> Callable[[Any, Any], Any]:
    """Returns a model with twelve layers of attention and MLP, for either framework."""
    xp = gt.xp

    def normalised(x: Any, scale: Any, shift: Any) -> Any:
        x = x - xp.mean(x, axis=-1, keepdims=True)
        return x / xp.sqrt(xp.mean(x**2, axis=-1, keepdims=True) + 1e-5) * scale + shift

    def heads(x: Any) -> Any:
        split = xp.reshape(x, (BATCH, LENGTH, HEADS, WIDTH // HEADS))
        return xp.permute_dims(split, (0, 2, 1, 3))

    def layer(p: Any, x: Any) -> Any:
        h = normalised(x, p["scale"], p["shift"])
        q, k, v = (heads(h @ p[name]) for name in ("query", "key", "value"))
        weights = xp.exp(q @ xp.permute_dims(k, (0, 1, 3, 2)) / (WIDTH // HEADS) ** 0.5)
        mixed = weights / xp.sum(weights, axis=-1, keepdims=True) @ v
        mixed = xp.reshape(xp.permute_dims(mixed, (0, 2, 1, 3)), (BATCH, LENGTH, WIDTH))
        x = x + mixed @ p["out"]
        h = normalised(x, p["scale_2"], p["shift_2"])
        return x + xp.tanh(h @ p["up"] + p["up_bias"]) @ p["down"] + p["down_bias"]

    def model(params: Any, x: Any) -> Any:
        for p in params:
            x = layer(p, x)
        return x

    return model


def losses(gt: Any) -> dict[str, Callable[[Any, Any], Any]]:
    """Returns the unclipped loss "healthy", and the loss "dead", which is clipped to a constant."""
    model, xp = transformer(gt), gt.xp
    return {
        "healthy": lambda params, x: xp.mean(model(params, x) ** 2),
        "dead": lambda params, x: xp.mean(xp.clip(model(params, x), 1e4, 2e4)),
    }


def timed(call: Callable[[], Any]) -> list[float]:
    """Returns the CPU seconds of the first call, and the median of later calls."""
    found = []
    for _ in range(1 + LATER):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return [found[0], statistics.median(found[1:])]


def measured(wing: str, case: str, argnums: int) -> dict[str, Any]:
    """Measures the times of `why_zero` for one row, in this process."""
    gt = importlib.import_module(f"gradtools.{wing}")
    (params, x), f = leaves(gt), losses(gt)[case]
    reports = []
    doctor = timed(lambda: reports.append(gt.why_zero(f, params, x, argnums=argnums)))
    asked = len(reports[0].arguments)
    assert len(reports[0]) == (asked if case == "dead" else 0), str(reports[0])
    return {"doctor": doctor, "leaves": asked}


def forward(wing: str) -> list[float]:
    """Measures only the forward pass in this process."""
    gt = importlib.import_module(f"gradtools.{wing}")
    (params, x), f = leaves(gt), losses(gt)["healthy"]
    return timed(lambda: float(f(params, x)))


def elsewhere(*words: str) -> Any:
    """Runs this program in a new process and returns its output."""
    program = [sys.executable, __file__, "--row", *words]
    done = subprocess.run(program, check=True, capture_output=True, encoding="utf-8", cwd=ROOT)
    return json.loads(done.stdout)


def rows(wing: str) -> list[str]:
    first, later = elsewhere(wing, "forward")
    title = f"{wing} {version(wing)}"
    found = [f"| {title} | one forward pass | | {first:.2f} | {later:.2f} | |"]
    for case in ("healthy", "dead"):
        for argnums in (1, 0):
            row = elsewhere(wing, case, str(argnums))
            cold, warm = row["doctor"]
            ratio = f"{cold / first:.1f}, {warm / later:.1f}"
            found.append(
                f"| {title} | {case} | {row['leaves']} | {cold:.2f} | {warm:.2f} | {ratio} |"
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", nargs="+", help="one row, printed as JSON")
    row = parser.parse_args().row
    if row:
        wing, case, *argnums = row
        print(json.dumps(measured(wing, case, int(argnums[0])) if argnums else forward(wing)))
        return
    lines = [
        f"# why_zero on {LAYERS} layers, {datetime.date.today()}, Python {sys.version.split()[0]}",
        "",
        "The table shows the CPU time, in seconds, of the first call in a new process, and the "
        f"median CPU time of {LATER} later calls. The last column shows both times divided by the "
        "times of a first and of a later forward pass.",
        "",
        "| framework | loss | differentiated leaves | first call | later | forward passes |",
        "|---|---|---|---|---|---|",
        *rows("torch"),
        *rows("jax"),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    (pathlib.Path(__file__).parent / "results" / "why_zero.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
