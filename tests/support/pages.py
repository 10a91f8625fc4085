"""Finds the Python code blocks of README.md and docs/, and runs them.

Each block runs as a separate program. A block that imports gradtools with the line in `EITHER` runs
once for each backend. The title of a block, which the page shows above the code, may define how the
block ends::

    ```python title="raises: does not reach the output"   an error with this text
    ```python title="warns: no deterministic"             a warning with this text
    ```python title="not run: needs two processes"        the reason why no test runs it
    ```python title="with: KERAS_BACKEND=torch"           in a subprocess with this environment
    ```python title="pytest: test_port.py"                a file of that name that pytest runs

A block must print the text that the page shows after "Output:" or "Output with PyTorch:". A block
that imports a package of the extra ``integration`` runs with the integration tests.
`upstream_reports` runs the programs of docs/upstream.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import re
import subprocess
import symtable
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import gradtools

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if page.parent.name != "upstream"]
FENCE = re.compile(
    r"^```python(?: title=\"(?:(\w[\w ]*): )?([^\"\n]*)\")?\n(.*?)^```"
    r"(?:\n\nOutput(?: with (PyTorch|JAX))?:\n\n```\n(.*?)^```)?",
    re.DOTALL | re.MULTILINE,
)
# The import line of blocks that run in both backends; the site shows such a block as two tabs.
EITHER = "import gradtools.torch as gt  # or: import gradtools.jax as gt"
# Import names of the packages in the extra `integration` and of their dependencies.
OTHER_PACKAGES = {
    *("accelerate", "diffrax", "diffusers", "keras", "lightning", "numba", "numpyro"),
    *(
        "opacus",
        "optimistix",
        "peft",
        "pytorch_revgrad",
        "sentence_transformers",
        "timm",
        "tokenizers",
    ),
    *("torchdiffeq", "torchjd", "torchopt", "torchrl", "torchvision", "torchviz", "transformers"),
}


@dataclass(frozen=True)
class Block:
    """A Python code block with its position and the expected outcome of its execution."""

    page: Path
    line: int
    code: str
    end: str = ""
    text: str = ""
    printed: str = ""
    # the backend whose output the page shows, if the block runs in both backends
    printed_by: str = ""

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def picks_a_backend(self) -> bool:
        return EITHER not in self.code

    def with_backend(self, namespace: str) -> Block:
        """Return the block with the import line replaced by the import of one namespace."""
        return replace(self, code=self.code.replace(EITHER, f"import {namespace} as gt"))

    @property
    def packages(self) -> set[str]:
        """Return the packages that the block imports."""
        return set(re.findall(r"^\s*(?:import|from) (\w+)", self.code, re.MULTILINE))

    @property
    def missing_names(self) -> set[str]:
        """Return the global names that the block reads but does not define."""
        if self.end == "not run":
            return set()
        tables = [symtable.symtable(self.code, self.name, "exec")]
        read, defined = set(), {s.get_name() for s in tables[0].get_symbols() if s.is_assigned()}
        defined |= {s.get_name() for s in tables[0].get_symbols() if s.is_imported()}
        while tables:
            table = tables.pop()
            tables += table.get_children()
            top = table.get_type() == "module"
            read |= {s.get_name() for s in table.get_symbols() if top or s.is_global()}
        return read - defined - set(vars(builtins)) - {"__name__", "__file__"}

    @property
    def with_other_packages(self) -> bool:
        return bool(self.packages & OTHER_PACKAGES)

    def run(self) -> None:
        """Run the block and check that it ends as its title specifies."""
        if self.end == "not run":
            pytest.skip(self.text)
        for package in self.packages:
            if find_spec(package) is None:
                pytest.skip(f"{package} is not installed")
        if self.end in ("with", "pytest"):
            self._run_apart()
        elif self.end == "raises":
            with pytest.raises(Exception, match=re.escape(self.text)):
                self._run()
        elif self.end == "warns":
            with pytest.warns(Warning, match=re.escape(self.text)):
                self._run()
        else:
            assert not self.end, f"{self.name}: unknown first word {self.end!r} of a title"
            self._run()

    def _run(self) -> None:
        # leading empty lines make the line numbers in tracebacks equal those of the page
        source = "\n" * self.line + self.code
        module = ModuleType("page")  # registered below, because torch.compile looks up the module
        sys.modules["page"] = module
        try:
            with default_precision(), contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(source, str(self.page), "exec"), vars(module))
            if f"gradtools.{self.printed_by}" in self.code or not self.printed_by:
                assert _exact(self.printed) in _exact(out.getvalue()), (
                    f"{self.name}: {out.getvalue()}"
                )
        finally:
            del sys.modules["page"]

    def _run_apart(self) -> None:
        """Run the block in a subprocess with the settings of its title, or as a test file."""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, self.text if self.end == "pytest" else "page.py")
            file.write_text(self.code, encoding="utf-8")
            tested = ["-m", "pytest", "-q", "-p", "gradtools.testing.plugin"]
            path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
            settings = (
                dict(s.split("=", 1) for s in self.text.split()) if self.end == "with" else {}
            )
            run = subprocess.run(
                [sys.executable, *(tested if self.end == "pytest" else []), file.name],
                cwd=folder,
                env={**os.environ, **settings, "PYTHONPATH": path},
                capture_output=True,
                text=True,
                check=False,
            )
        assert run.returncode == 0, f"{self.name}:\n{run.stdout}{run.stderr}"


def _exact(said: str) -> str:
    """Normalize printed text: replace rounding errors, file names and line numbers."""
    return re.sub(r"[\w-]+\.(?:py|md):\d+", "line", re.sub(r"\d\.\de-1\d", "tiny", said))


def blocks(pages: list[Path] = PAGES) -> list[Block]:
    return [
        Block(
            page,
            text.count("\n", 0, found.start()) + 1,
            code=found[3],
            end=found[1] or "",
            text=found[2] or "",
            printed=found[5] or "",
            printed_by={"PyTorch": "torch", "JAX": "jax"}.get(found[4], ""),
        )
        for page in pages
        for text in [page.read_text(encoding="utf-8")]
        for found in FENCE.finditer(text)
    ]


@contextlib.contextmanager
def default_precision() -> Iterator[None]:
    """Context manager in which JAX has its default 32-bit precision, as on a user's machine."""
    if "jax" not in gradtools.available_backends():
        yield
        return
    import jax

    with jax.enable_x64(False):
        yield


def named(found: list[Block]) -> dict:
    marks = {True: pytest.mark.integration, False: ()}
    return {
        "argvalues": [
            pytest.param(block, id=block.name, marks=marks[block.with_other_packages])
            for block in found
        ]
    }
