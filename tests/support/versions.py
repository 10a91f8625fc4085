"""Runs the tests with other versions: ``python -m tests.support.versions [NAME ...]``.

Each pair of versions has an environment in ``.venv-versions/``, which is built once. pip installs
CPU wheels of PyTorch if PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS provides them; otherwise it downloads
a CUDA build of about 3 GB. Before the installation, a message states this size. Each run executes
the quick tests; tests in the ledger (`version_ledger`) must fail. ``--again`` runs only the tests
that have not passed yet, after an interruption or a change. ``versions_seen.json`` stores the
results, from which the table of docs/support.md is generated.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import version_ledger

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-versions"
PACKAGES = """array-api-compat autograd equinox expecttest flax hypothesis matplotlib optax pytest
    networkx packaging pytest-xdist quickjs-ng scikit-learn scipy tqdm""".split()
TESTS = ["tests"]
SEEN = Path(__file__).with_name("versions_seen.json")
PAGE = ROOT / "docs" / "support.md"
START, END = "<!-- versions table: generated -->\n", "<!-- end of versions table -->\n"


@dataclass(frozen=True)
class Pair:
    """The versions of Python and of both frameworks in one environment."""

    python: str
    torch: str
    jax: str


PAIRS = {
    "oldest": Pair("3.11", "2.8.0", "0.7.2"),
    "servers": Pair("3.12", "2.11.0", "0.11.2"),
    "before-newest": Pair("3.11", "2.14.1", "0.10.2"),
    "newest": Pair("3.12", "2.15.0", "0.12.0.1"),
    "newest-313": Pair("3.13", "2.15.0", "0.12.0.1"),
    "newest-314": Pair("3.14", "2.15.0", "0.12.0.1"),
}


def interpreter(version: str) -> str | None:
    """Return the path of this version of Python from PATH or pyenv, or None if there is none."""
    candidates = [shutil.which(f"python{version}")]
    pyenv = Path.home() / ".pyenv" / "versions"
    candidates += [str(p / "bin" / "python") for p in sorted(pyenv.glob(f"{version}.*"))]
    for candidate in filter(None, candidates):
        done = subprocess.run([candidate, "-c", ""], capture_output=True, check=False)
        if done.returncode == 0:
            return candidate
    return None


def built(name: str, pair: Pair) -> Path | None:
    """Build a pair's environment once; return its interpreter, or None if Python is missing."""
    folder = FOLDER / name
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    stamp = folder / ".installed"
    if stamp.exists():
        return python
    base = interpreter(pair.python)
    if base is None:
        return None
    print(f"{name}: installing {pair}; PyTorch takes about 3 GB if no CPU wheel exists", flush=True)
    subprocess.run([base, "-m", "venv", folder], check=True)
    frameworks = [f"torch=={pair.torch}", f"jax=={pair.jax}", f"jaxlib=={pair.jax}"]
    install = [python, "-m", "pip", "install", "-q"]
    # ignore constraints on versions in the pip configuration of this machine
    exact = {**os.environ, "PIP_CONSTRAINT": os.devnull}
    subprocess.run([*install, *frameworks, *PACKAGES], env=exact, check=True)
    subprocess.run([*install, "--no-deps", "-e", ROOT], check=True)
    stamp.touch()
    return python


_VERSIONS = """
import importlib, json, platform
import gradtools

names = ("numpy", *gradtools.available_backends())
versions = {name: importlib.import_module(name).__version__ for name in names}
print(json.dumps({**versions, "python": platform.python_version()}))
"""


def installed(python: Path, environment: dict[str, str]) -> dict[str, str]:
    """Return the versions of Python, NumPy and the frameworks in an environment."""
    done = subprocess.run(
        [python, "-c", _VERSIONS], cwd=ROOT, env=environment, capture_output=True, check=True
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def table(seen: dict[str, Any]) -> str:
    """Return the table "What works on which version" with a column for each tested pair."""
    pairs = [name for name in PAIRS if name in seen]
    versions = lambda name: [seen[pair]["versions"].get(name, "–") for pair in pairs]
    rows = [["PyTorch", *(v.partition("+")[0] for v in versions("torch"))]]
    rows += [["JAX", *versions("jax")], ["Python", *versions("python")]]
    rows.append(["NumPy", *versions("numpy")])
    rows.append(["tests that passed", *(seen[pair]["tests"] for pair in pairs)])
    header = ["", *pairs]
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write_page(seen: dict[str, Any]) -> str:
    """Return the text of docs/support.md with the table of the stored results."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    after = rest.partition(END)[2]
    return f"{before}{START}\n{table(seen)}\n{END}{after}"


def main() -> int:
    """Run the tests for the named pairs or for all pairs; return exit status 1 if a run failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PAIRS))
    parser.add_argument("--tests", nargs="*", default=TESTS, help="test files or folders")
    parser.add_argument("--workers", default="2", help="number of test processes")
    parser.add_argument("--again", action="store_true", help="skip tests that passed before")
    args = parser.parse_args()
    failed = []
    for name in args.names or PAIRS:
        python = built(name, PAIRS[name])
        if python is None:
            print(f"{name}: left out: Python {PAIRS[name].python} is not installed")
            continue
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = str(ROOT)
        passed, tests = run_tests(name, python, environment, args)
        failed += [] if passed else [name]
        if args.tests == TESTS:
            seen = json.loads(SEEN.read_text(encoding="utf-8")) if SEEN.exists() else {}
            seen[name] = {"versions": installed(python, environment), "tests": tests}
            SEEN.write_text(json.dumps(seen, indent=1) + "\n", encoding="utf-8")
            PAGE.write_text(write_page(seen), encoding="utf-8")
    print("versions:", "failed on " + ", ".join(failed) if failed else "all passed")
    return bool(failed)


def run_tests(
    name: str, python: Path, environment: dict[str, str], args: argparse.Namespace
) -> tuple[bool, str]:
    """Run the tests in an environment; return whether they passed and a summary of the counts."""
    results = FOLDER / f"{name}.jsonl"
    before = version_ledger.outcomes(results) if args.again else {}
    done = {test: said for test, said in before.items() if said in version_ledger.DONE}
    results.write_text("".join(f"{json.dumps(line)}\n" for line in done.items()), "utf-8")
    marks = "not slow and not sweep and not ahead"
    run = [python, "-m", "pytest", "-q", "-p", "tests.support.version_ledger", "-m", marks]
    run += ["-p", "no:cacheprovider", f"--version-results={results}"]
    run += ["-n", args.workers, "--dist", "worksteal", *(["--again"] if args.again else [])]
    print(f"{name}: {PAIRS[name]}", flush=True)
    status = subprocess.run([*run, *args.tests], cwd=ROOT, env=environment, check=False).returncode
    counts = Counter(version_ledger.outcomes(results).values())
    said = f"{counts['passed']}, {counts['ledger']} known failures"
    if counts["failed"]:
        said += f", {counts['failed']} failed"
    print(f"{name}: {said}", flush=True)
    nothing_to_run = bool(before) and status == pytest.ExitCode.NO_TESTS_COLLECTED
    return status == 0 or nothing_to_run, said


if __name__ == "__main__":
    sys.exit(main())
