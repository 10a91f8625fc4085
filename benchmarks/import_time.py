"""What importing a wing adds to importing its framework: the median of paired fresh processes."""

from __future__ import annotations

import datetime
import pathlib
import statistics
import subprocess
import sys
import time
from importlib.metadata import version

PAIRS = 7


def seconds(program: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True)
    return time.perf_counter() - start


def main() -> None:
    lines = [
        f"# Import time, {datetime.date.today()}, Python {sys.version.split()[0]}",
        "",
        f"Medians of {PAIRS} pairs of fresh processes, taken in turns.",
        "",
        "| wing | framework alone, s | with the wing, s | the wing adds, ms |",
        "|---|---|---|---|",
    ]
    for name, framework in (("torch", "import torch"), ("jax", "import jax, jax.numpy")):
        wing = f"{framework}; import gradtools.{name}"
        seconds(wing)
        pairs = [(seconds(framework), seconds(wing)) for _ in range(PAIRS)]
        alone, both = (statistics.median(times) for times in zip(*pairs, strict=True))
        added = 1000 * statistics.median(b - a for a, b in pairs)
        lines.append(f"| {name} {version(name)} | {alone:.2f} | {both:.2f} | {added:.0f} |")
    text = "\n".join(lines) + "\n"
    print(text)
    target = pathlib.Path(__file__).parent / "results" / "import_time.md"
    target.parent.mkdir(exist_ok=True)
    target.write_text(text)


if __name__ == "__main__":
    main()
