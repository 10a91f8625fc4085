"""Mutation tests: change one line in a copy of the package and run the quick tests.

    make mutants                                  # all of mutants.toml
    python -m tests.support.mutants torch/rules   # only files with one of the words in their names

A surviving mutant shows a line that no quick test covers or that has no effect. The test files that
mutants.toml lists run first, up to the first failure; if they pass, the whole quick tier runs. The
tests run in copies of the tracked files, one per worker, and the source tree is not changed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "tests" / "support" / "mutants.toml"
LEAST = 19 / 20  # the fraction of mutants that the tests must detect
_QUICK = "not slow and not sweep and not ahead"
_LONGEST = 3600  # Timeout in seconds, which also detects mutants that never terminate.
# Outcomes by pytest's exit status: all passed, some failed, import error, no quick test.
_OUTCOMES = {0: "survived", 1: "seen", 2: "seen", 5: "survived"}


@dataclass(frozen=True)
class Mutant:
    """A change of one line in one file of the package."""

    file: str
    was: str
    now: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file}: {self.was.strip()}"

    def of(self, package: Path) -> str:
        """Return the text of the file with the change."""
        text = (package / self.file).read_text(encoding="utf-8")
        if text.count(self.was) != 1:
            raise ValueError(
                f"{self}: expected 1 occurrence of the text, found {text.count(self.was)}"
            )
        return text.replace(self.was, self.now)


def read() -> list[Mutant]:
    """Return the mutants of mutants.toml."""
    found = tomllib.loads(LIST.read_text(encoding="utf-8"))["mutant"]
    return [Mutant(m["file"], m["was"], m["now"], tuple(m["tests"])) for m in found]


@contextmanager
def changed(copy: Path, mutant: Mutant) -> Iterator[None]:
    """Apply the mutant to the copy and restore the file afterwards."""
    file = copy / "gradtools" / mutant.file
    before, after = file.read_text(encoding="utf-8"), mutant.of(copy / "gradtools")
    file.write_text(after, encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(before, encoding="utf-8")


def outcome(copy: Path, tests: Iterable[str]) -> str:
    """Run the quick tests in some or all test files on the copy; return "survived" or "seen"."""
    files = [f"tests/{name}" for name in tests] or ["--ignore=tests/house/test_mutants.py"]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", _QUICK]
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    env = {**os.environ, **one_thread, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *files],
            cwd=copy,
            env=env,
            capture_output=True,
            timeout=_LONGEST,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "seen"
    if done.returncode not in _OUTCOMES:
        raise RuntimeError(done.stdout.decode()[-2000:] + done.stderr.decode()[-2000:])
    return _OUTCOMES[done.returncode]


def trial(copies: SimpleQueue[Path], own: bool, mutant: Mutant) -> tuple[Mutant, str]:
    """Return a mutant and its outcome; if `own`, run only the test files that the mutant lists."""
    copy = copies.get()
    try:
        with changed(copy, mutant):
            found = outcome(copy, mutant.tests)
            where = "by its own tests"
            if found == "survived" and not own:
                found, where = outcome(copy, ()), "only by other tests"
    finally:
        copies.put(copy)
    return mutant, f"{found} {where}" if found == "seen" else found


def copied(folder: Path) -> Path:
    """Copy the files that git tracks into a folder."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, names.stdout.decode().split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="parts of file names; default: all files")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--own", action="store_true", help="run only the tests that mutants.toml lists"
    )
    options = parser.parse_args()
    wanted = [
        m for m in read() if not options.words or any(word in m.file for word in options.words)
    ]
    survived, copies = [], SimpleQueue[Path]()
    with tempfile.TemporaryDirectory() as folder:
        for k in range(options.workers):
            copies.put(copied(Path(folder) / str(k)))
        with ThreadPoolExecutor(options.workers) as pool:
            tried = pool.map(lambda m: trial(copies, options.own, m), wanted)
            for k, (mutant, found) in enumerate(tried, start=1):
                print(f"[{k}/{len(wanted)}] {found}: {mutant}", flush=True)
                survived += [mutant] if found == "survived" else []
    print(f"{len(wanted) - len(survived)} of {len(wanted)} mutants are detected")
    if len(survived) > (1 - LEAST) * len(wanted):
        sys.exit(1)


if __name__ == "__main__":
    main()
