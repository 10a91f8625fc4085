"""The blocks of Python on README.md and docs/, and how each is run.

A block that imports gradtools by itself runs once; one that only says ``gt`` runs in each backend.
The title of a block, which a reader sees above it, may say how it ends::

    ```python title="raises: does not reach the output"   an error with this text
    ```python title="warns: no deterministic"             a warning with this text
    ```python title="not run: needs two processes"        the reason why no test runs it
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

import gradtools

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^```python(?: title=\"(?:(\w[\w ]*): )?([^\"\n]*)\")?\n(.*?)^```", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    """One block of Python, where it stands, and how it ends if its title says so."""

    page: Path
    line: int
    code: str
    end: str = ""
    text: str = ""

    @property
    def name(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def picks_a_backend(self) -> bool:
        return "gt" not in re.findall(r"\bgt\b", self.code) or "as gt" in self.code

    def run(self, **names: object) -> None:
        """Runs it as a reader would, and sees to it that it ends as its title says."""
        if self.end == "not run":
            pytest.skip(self.text)
        for module in re.findall(r"^\s*(?:import|from) ([\w.]+)", self.code, re.MULTILINE):
            package = module.partition(".")[0]
            if find_spec(package) is None:
                pytest.skip(f"{package} is not installed")
        if self.end == "raises":
            with pytest.raises(Exception, match=re.escape(self.text)):
                self._run(names)
        elif self.end == "warns":
            with pytest.warns(Warning, match=re.escape(self.text)):
                self._run(names)
        else:
            assert not self.end, f"{self.name}: the title begins with {self.end!r}"
            self._run(names)

    def _run(self, names: dict[str, object]) -> None:
        source = "\n" * self.line + self.code  # so that a traceback names the page's line
        module = ModuleType("page")  # a real one, which torch.compile looks up
        vars(module).update(names)
        sys.modules["page"] = module
        try:
            with default_precision():
                exec(compile(source, str(self.page), "exec"), vars(module))
        finally:
            del sys.modules["page"]


def blocks(pages: list[Path] = PAGES) -> list[Block]:
    return [
        Block(
            page, text.count("\n", 0, found.start()) + 1, found[3], found[1] or "", found[2] or ""
        )
        for page in pages
        for text in [page.read_text(encoding="utf-8")]
        for found in FENCE.finditer(text)
    ]


@contextlib.contextmanager
def default_precision() -> Iterator[None]:
    """As a reader has it: JAX without 64 bits."""
    if "jax" not in gradtools.available_backends():
        yield
        return
    import jax

    with jax.enable_x64(False):
        yield


def named(found: list[Block]) -> dict:
    return {"argvalues": found, "ids": [block.name for block in found]}
