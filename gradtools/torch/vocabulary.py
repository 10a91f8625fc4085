"""PyTorch's programs in the vocabulary of the formula."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gradtools.errors import GradtoolsError
from gradtools.seeing.graph import Graph
from gradtools.seeing.program import Program
from gradtools.torch.recording.observing import put_back


def formula_graph(program: Program) -> Graph:
    """One run of a program."""
    raise GradtoolsError("formula: PyTorch's programs are not translated yet.")


@contextmanager
def trying(program: Program, wide: bool) -> Iterator[None]:
    """Inside, f may run; what it changes is undone."""
    with put_back(program.run, program.leaves):
        yield
