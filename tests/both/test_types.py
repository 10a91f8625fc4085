"""Tests README, the tour, the examples and typed_programs.py with mypy and pyright.

In the examples, errors are ignored on lines without a call of gradtools, because the types of other
libraries vary.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.pages import blocks

ROOT = Path(__file__).parents[2]
HERE = ROOT / "tests" / "support"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PROGRAMS = HERE / "typed_programs.py"
CALL = re.compile(r"\b(gt|gradtools)\b")

pytestmark = pytest.mark.slow

Findings = set[tuple[Path, int, str]]


def mypy(files: list[Path], cache: Path) -> Findings:
    pytest.importorskip("mypy")
    options = ["--ignore-missing-imports", "--check-untyped-defs", "--follow-imports=silent"]
    options += ["--config-file=", "--no-error-summary", f"--cache-dir={cache}"]
    said = _said([sys.executable, "-m", "mypy", *options, *map(str, files)])
    found = re.findall(r"^(.+?):(\d+): error: (.*)$", said, re.MULTILINE)
    return {((HERE / file).resolve(), int(line), text) for file, line, text in found}


def pyright(files: list[Path], cache: Path) -> Findings:
    pytest.importorskip("pyright")
    options = ["--outputjson", "--pythonpath", sys.executable]
    said = json.loads(_said([sys.executable, "-m", "pyright", *options, *map(str, files)]))
    return {
        ((HERE / one["file"]).resolve(), one["range"]["start"]["line"] + 1, one["message"])
        for one in said["generalDiagnostics"]
        if one["severity"] == "error"
    }


def _said(command: list[str]) -> str:
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    environment = {**os.environ, "MYPYPATH": path, "PYTHONPATH": path}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE)
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    return ran.stdout


def pages(folder: Path) -> list[Path]:
    """Write every code block of README and the tour to a file, once for each of its backends."""
    files = []
    for block in blocks([ROOT / "README.md", ROOT / "docs" / "tour.md"]):
        namespaces = ["gradtools.torch", "gradtools.jax"]
        for k, namespace in enumerate(namespaces[: 1 if block.picks_a_backend else 2]):
            file = folder / f"{block.page.stem}_{block.line}_{'ab'[k]}.py"
            file.write_text(block.with_backend(namespace).code, encoding="utf-8")
            files.append(file)
    return files


@pytest.mark.parametrize("checker", [mypy, pyright])
def test_checkers_follow_what_is_documented_and_find_what_is_wrong(
    checker: Callable[[list[Path], Path], Findings],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    documented = pages(tmp_path)
    cache = request.config.rootpath / ".pytest_cache" / "mypy"
    found = checker([*documented, *EXAMPLES, PROGRAMS], cache)

    lines = PROGRAMS.read_text(encoding="utf-8").splitlines()
    wrong = {k for k, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert {line for file, line, _ in found if file == PROGRAMS} == wrong, _told(found, PROGRAMS)

    elsewhere = {(file, line, text) for file, line, text in found if file != PROGRAMS}
    counted = {one for one in elsewhere if one[0] not in EXAMPLES or _calls(one[0], one[1])}
    assert not counted, _told(counted)


def _calls(file: Path, line: int) -> bool:
    return bool(CALL.search(file.read_text(encoding="utf-8").splitlines()[line - 1]))


def _told(found: Findings, of: Path | None = None) -> str:
    return "\n".join(f"{file.name}:{n}: {s}" for file, n, s in sorted(found) if of in (None, file))
