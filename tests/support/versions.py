"""The quick tests on other versions: ``python -m tests.support.versions [NAME ...]``.

Each pair has an environment in ``.venv-versions/``, which is built once. CPU wheels of PyTorch are
taken where PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS offers them; otherwise pip fetches a CUDA build of
about 3 GB, which is announced before.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-versions"
PACKAGES = """array-api-compat autograd equinox expecttest flax hypothesis matplotlib optax pytest
    pytest-xdist quickjs-ng scikit-learn scipy tqdm""".split()
TESTS = ["tests/torch", "tests/jax", "tests/operators", "tests/both"]


@dataclass(frozen=True)
class Pair:
    """Versions of Python and of both frameworks."""

    python: str
    torch: str
    jax: str


PAIRS = {
    "oldest": Pair("3.11", "2.8.0", "0.7.2"),
    "servers": Pair("3.12", "2.11.0", "0.11.2"),
    "before-newest": Pair("3.11", "2.14.1", "0.10.2"),
    "newest": Pair("3.12", "2.15.0", "0.12.0.1"),
    "newest-313": Pair("3.13", "2.15.0", "0.12.0.1"),
}


def interpreter(version: str) -> str | None:
    """The Python of a version that runs: one in PATH, or pyenv's."""
    candidates = [shutil.which(f"python{version}")]
    pyenv = Path.home() / ".pyenv" / "versions"
    candidates += [str(p / "bin" / "python") for p in sorted(pyenv.glob(f"{version}.*"))]
    for candidate in filter(None, candidates):
        done = subprocess.run([candidate, "-c", ""], capture_output=True, check=False)
        if done.returncode == 0:
            return candidate
    return None


def built(name: str, pair: Pair) -> Path | None:
    """The interpreter of a pair's environment; None where there is no such Python here."""
    folder = FOLDER / name
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    stamp = folder / ".installed"
    if stamp.exists():
        return python
    base = interpreter(pair.python)
    if base is None:
        return None
    print(f"{name}: installing {pair}; without CPU wheels PyTorch is about 3 GB", flush=True)
    subprocess.run([base, "-m", "venv", folder], check=True)
    frameworks = [f"torch=={pair.torch}", f"jax=={pair.jax}", f"jaxlib=={pair.jax}"]
    subprocess.run([python, "-m", "pip", "install", "-q", *frameworks, *PACKAGES], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", "-e", ROOT], check=True)
    stamp.touch()
    return python


def main() -> int:
    """Runs the pairs that are named, or all; the exit status is 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PAIRS))
    parser.add_argument("--tests", nargs="*", default=TESTS, help="files or folders")
    args = parser.parse_args()
    failed = []
    for name in args.names or PAIRS:
        python = built(name, PAIRS[name])
        if python is None:
            print(f"{name}: left out, no Python {PAIRS[name].python} here")
            continue
        marks = "not slow and not sweep and not ahead"
        run = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", "-m", marks]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        done = subprocess.run([*run, *args.tests], cwd=ROOT, env=environment, check=False)
        if done.returncode:
            failed.append(name)
    print("versions:", "failed on " + ", ".join(failed) if failed else "all passed")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
