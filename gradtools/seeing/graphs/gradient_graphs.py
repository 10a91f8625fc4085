"""Defines the operator `gradient_graph`, which returns a program and its gradients as a graph."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradtools.arguments.checks import order_among
from gradtools.backend import Operators, P
from gradtools.boundary import user_facing_methods
from gradtools.errors import GradtoolsError
from gradtools.printing import printable
from gradtools.seeing.graphs.edges import edges_of, kept_anew
from gradtools.seeing.graphs.nodes import Edge, PlainGraph
from gradtools.seeing.graphs.passes import SECOND
from gradtools.seeing.graphs.program import Framework, LeafProgram
from gradtools.seeing.pictures import drawing, saving, texts


@user_facing_methods
@dataclass(frozen=True, eq=False, repr=False)
class Graph(PlainGraph):
    """The nodes and values of one run of a program, with text, SVG and HTML output."""

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Returns an edge for each reader of each value; edges to outputs come last."""
        return edges_of(self)

    @property
    def kept(self) -> dict[int, int]:
        """Maps each value that the forward pass saves for later passes to its size in bytes.

        Arguments and captured arrays are not counted, because the caller references them; a view
        counts as the value that owns its storage.
        """
        return kept_anew(self)

    def __str__(self) -> str:
        return printable(self.to_text())

    to_text = texts.to_text
    to_dot = texts.to_dot
    to_mermaid = texts.to_mermaid
    to_svg = drawing.to_svg
    to_html = drawing.to_html

    def save(self, path: str | os.PathLike[str], **view: Any) -> None:
        """Saves the graph as .svg, .html, .dot, .gv, .mmd, .md or .txt, depending on the suffix."""
        saving.save(self, FORMS, path, **view)

    def _repr_html_(self) -> str:
        return drawing.framed(self.to_html())


FORMS: saving.Forms = {
    ".svg": Graph.to_svg,
    ".html": Graph.to_html,
    ".htm": Graph.to_html,
    ".dot": Graph.to_dot,
    ".gv": Graph.to_dot,
    ".mmd": Graph.to_mermaid,
    ".md": lambda graph, **view: f"```mermaid\n{graph.to_mermaid(**view)}```\n",
    ".txt": lambda graph, **view: f"{graph.to_text(**view)}\n",
}


# --- the operator ------------------------------------------------------------------------

_ORDERS = range(SECOND + 1)


class Graphing(Operators):
    """Defines `gradient_graph` for one backend, PyTorch or JAX."""

    def gradient_graph(
        self,
        f: Callable[P, Any] | None = None,
        *args: Any,
        order: int = 1,
        argnums: int | tuple[int, ...] = 0,
        outputs: Any = None,
        **kwargs: Any,
    ) -> Graph:
        """Returns the operations of f and of its gradients as a graph.

        The passes compute these values, where y = f(x), c is a cotangent of y, and v is a cotangent
        of g::

            forward                    x        ->  y
            backward                   x, c     ->  g = J^H c
            backward of the backward   x, c, v  ->  d<g, v>/dx, d<g, v>/dc

        Each operation has a pass (``node.phase``), a source line of f, the names of its modules,
        and a ``node.mark``, which names the enclosing operator ("custom rule", "edited gradient",
        "chunked", "frozen", "checkpoint", "inner derivative") or is empty. ``edge.saved`` is True
        if a later pass reads the value, and ``edge.bytes`` is the size of the value. If a
        derivative is lost on an edge, ``edge.cut`` is the reason, as in `why_zero`.

        In PyTorch, f runs once, and its side effects are undone; the graph consists of aten
        operations, and all intermediates stay in memory until the graph is built. In JAX, f is
        traced.

        Args:
            f: A function from pytrees of arrays to pytrees of arrays, or a module.
            *args: Arguments of f; arrays of any shape and dtype.
            order: 0 for the forward pass, 1 to add the backward pass, 2 to add the backward of the
                backward.
            argnums: The position or positions of the differentiated arguments, whose leaves are
                floating or complex. In PyTorch, captured parameters that require grad are also
                differentiated; ``argnums=()`` selects only these parameters.
            outputs: A pytree of existing PyTorch tensors, passed instead of f. The graph is read
                from the ``grad_fn`` of the tensors and contains no constants. No program runs.
            **kwargs: Keyword arguments of f.

        Returns:
            A `Graph`. Inputs and outputs are named after f's parameters: "params['w']", "cotangent
            of output", "gradient of params['w']". A leaf has no gradient if no output is
            differentiable with respect to it. Use ``str()``, ``to_svg()``, ``to_html()``,
            ``to_dot()``, ``to_mermaid()`` or ``save()`` to show the graph; notebooks draw the graph
            automatically.

        Raises:
            GradtoolsError: neither or both of f and outputs are given, or outputs have no graph
                (always in JAX); order is not 0, 1 or 2; argnums is out of range or names an integer
                argument; f raises an error, returns no array, or (in JAX) converts a tracer to a
                NumPy array.

        Example:
            >>> x = gt.asarray(np.float32([1.0, 2.0]))
            >>> graph = gt.gradient_graph(lambda x: gt.xp.exp(x), x)
            >>> [(node.operation, node.phase) for node in graph.nodes]
            [('exp', 0), ('multiply', 1)]
            >>> [(edge.value == graph.outputs[0], edge.bytes) for edge in graph.edges if edge.saved]
            [(True, 8)]
            >>> [graph.values[value].name for value in graph.outputs]
            ['output', 'gradient of x']

        Source: the pictures in PyTorch's tutorial on double backward with custom functions.
        """
        expected = "0 (forward), 1 (with backward) or 2 (with backward of the backward)"
        order = order_among("gradient_graph", order, _ORDERS, expected)
        if (f is None) == (outputs is None):
            raise GradtoolsError(
                "gradient_graph: expected either a function with its arguments or outputs=, "
                f"a pytree of existing tensors; got {'neither' if f is None else 'both'}."
            )
        passes = Framework(self._backend, "gradient_graph").passes
        if f is None:
            return Graph(**vars(passes.graph_of_outputs(outputs)))
        program = LeafProgram(self._backend, "gradient_graph", f, args, kwargs, argnums)
        program.names = program.spoken
        with program.running(("", ", differentiated once,", ", differentiated twice,")[order]):
            return Graph(**vars(passes.gradient_graph(program, order)))
