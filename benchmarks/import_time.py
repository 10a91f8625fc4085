"""Measures the time to import a backend after its framework: the median over new processes.

Times are CPU seconds, which other processes affect little.
"""

from __future__ import annotations

import datetime
import os
import pathlib
import statistics
import subprocess
import sys
from importlib.metadata import version

RUNS = 9
ROOT = pathlib.Path(__file__).parent.parent
# Bytecode is cached, as in an installed package.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
TIMED = """
import sys, time
start = time.process_time()
{framework}
middle = time.process_time()
import gradtools.{name}
end = time.process_time()
ours = [name for name in sys.modules if name.split(".")[0] == "gradtools"]
print(middle - start, end - middle, len(ours))
"""


def seconds(name: str, framework: str) -> tuple[float, float, float]:
    """Returns the import times of the framework and the backend, and the number of modules."""
    program = TIMED.format(name=name, framework=framework)
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=ENVIRONMENT,
    )
    first, second, modules = map(float, done.stdout.split())
    return first, second, modules


def main() -> None:
    lines = [
        f"# Import time, {datetime.date.today()}, Python {sys.version.split()[0]}",
        "",
        f"Times are CPU milliseconds: medians over {RUNS} new processes, after a warm-up process.",
        "",
        "| backend | framework, ms | then the backend, ms | modules |",
        "|---|---|---|---|",
    ]
    for name, framework in (("torch", "import torch"), ("jax", "import jax, jax.numpy")):
        seconds(name, framework)
        runs = [seconds(name, framework) for _ in range(RUNS)]
        first, second, modules = (statistics.median(column) for column in zip(*runs, strict=True))
        times = f"{1000 * first:.0f} | {1000 * second:.0f}"
        lines.append(f"| {name} {version(name)} | {times} | {modules:.0f} |")
    text = "\n".join(lines) + "\n"
    print(text)
    target = pathlib.Path(__file__).parent / "results" / "import_time.md"
    target.parent.mkdir(exist_ok=True)
    target.write_text(text)


if __name__ == "__main__":
    main()
