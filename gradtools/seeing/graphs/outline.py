"""Defines the outline of a graph: a tree of blocks and boxes with arrows, before layout.

A `Box` is one operation, input or output. A `Block` is a module, a call or a loop, and may be
collapsed to one box. Each pass (forward, backward, backward of the backward) is a column: a `Block`
at the root. `Arrow`s connect boxes; if a box is in a collapsed block, its arrows are drawn at the
outermost collapsed block.

A block contains consecutive nodes of one pass and one scope. Collapsing consecutive nodes creates
no cycle, so the outline is acyclic for any set of collapsed blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from gradtools.arguments.checks import whole_or_none
from gradtools.seeing.graphs.nodes import Dependence, Node, Value, grouped, memory_of

ALIVE = "alive anyway"
PHASES = ("forward", "backward", "backward of the backward")


Makers = tuple[tuple[int, int], ...]  # pairs (key of a box, index of an output of the box)


@dataclass(frozen=True)
class Operand:
    """An operand of an operation: a value, or the text of a constant number.

    Attributes:
        makers: Pairs (key of a box, output index) of the operations that may produce the value. The
            result of a conditional has one pair per branch.
        number: The index of the value, a key of `Outline.values`.
        text: The text of a constant number; empty for values.
        strength: The dependence of the operation's outputs on the operand.
        cut: The kind of lost gradient, or None if no derivative is lost.
    """

    makers: Makers
    number: int = -1
    text: str = ""
    strength: Dependence = Dependence.DIFFERENTIABLE
    cut: str | None = None


@dataclass(eq=False)
class Box:
    """A drawn box: an operation, an input, a captured value or an output.

    Attributes:
        key: The unique key of the box, distinct from the keys of blocks.
        kind: "input", "captured", "output" or "operation".
        title: The name of the operation, input or output.
        phase: The pass that contains the box.
        node: The graph node of an operation; None for inputs and outputs.
        values: The outputs of the operation, or the value of the input or output.
        scope: The names of the modules around the box, relative to the enclosing call.
        name: The name of a call or module that contains only this operation, or empty.
        operands: The operands of the operation, in order.
        made: The letters of the values that the operation produces.
        call: The operation with the letters of its operands, such as "matmul(a, b)".
    """

    key: int
    kind: str
    title: str
    phase: int
    node: Node | None = None
    values: tuple[Value, ...] = ()
    scope: tuple[str, ...] = ()
    name: str = ""
    operands: list[Operand] = field(default_factory=list)
    made: str = ""
    call: str = ""

    @property
    def mark(self) -> str:
        """Returns the node's mark, such as "custom rule", and the name of its rule."""
        if self.node is None or not self.node.mark:
            return ""
        return f"{self.node.mark} {self.node.attributes.get('rule', '')}".rstrip()

    @property
    def alert(self) -> str:
        """Returns the kind of lost gradient at this operation, or an empty string."""
        return next((operand.cut for operand in self.operands if operand.cut), "")

    @property
    def sizes(self) -> list[str]:
        """Returns the shapes and dtypes of the first two values of the box."""
        more = [f"and {len(self.values) - 2} more"] if len(self.values) > 2 else []
        return [*map(value_text, self.values[:2]), *more]

    @property
    def lines(self) -> tuple[str, ...]:
        """Returns the lines of text below the title of the box."""
        return (*([self.name] if self.name else []), *self.sizes)

    @property
    def hint(self) -> str:
        """Returns the tooltip: native operation name, modules, and the user's source line."""
        if self.node is None:
            return ""
        native = self.node.native if self.node.native != self.node.operation else ""
        source = self.node.source
        where = f"{source}: {source.text}" if source else ""
        return "\n".join(filter(None, (native, ".".join(self.node.scope), where)))

    @property
    def heading(self) -> str:
        """Returns the operation as an assignment, such as "c = matmul(a, b)"."""
        if self.kind == "output":
            return f"{self.title} = {self.call}" if self.call else self.title
        expression = self.call if self.kind == "operation" and self.call else self.title
        return f"{self.made} = {expression}" if self.made else expression


@dataclass(eq=False)
class Block:
    """A group of boxes that may be collapsed into one box.

    Attributes:
        kind: "pass", "scope", "loop", "branch" or "call".
        title: The name of the pass, module, call, loop or branch.
        scope: The names of the modules that contain the block, outermost first.
        phase: The pass in which the block runs.
        children: The boxes and blocks inside the block, in program order.
        mark: The mark of the call or loop, as in `Node.mark`.
        key: The unique key of the block, distinct from the keys of boxes.
        made: Maps the letter of each value that leaves the block to the printed form of the letter.
        given: Maps the letter of each value that enters the block to the printed form of the
            letter, such as "✕a".
    """

    kind: str
    title: str
    scope: tuple[str, ...]
    phase: int
    children: list[Box | Block] = field(default_factory=list)
    mark: str = ""
    key: int = -1
    made: dict[str, str] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Returns the module names in `scope`, joined by dots."""
        return ".".join(self.scope) or self.title

    @property
    def signature(self) -> str:
        """Returns the outputs and inputs of a collapsed block, such as "c = (a, b)"."""
        made, given = ", ".join(self.made.values()), ", ".join(self.given.values())
        return f"{made} = ({given})" if made else f"({given})"

    @property
    def boxes(self) -> tuple[Box, ...]:
        """Returns all boxes in the block, in program order."""
        return tuple(item for item in self.walk() if isinstance(item, Box))

    @cached_property
    def operations(self) -> int:
        """Returns the number of operations in the block."""
        return sum(box.kind == "operation" for box in self.boxes)

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """Returns the lines of text below the title of the collapsed block."""
        alerts = {box.alert for box in self.boxes if box.alert}
        results = sum(box.kind == "output" for box in self.boxes)
        return (
            counted(self.operations, "operation"),
            *sorted(alerts),
            *([f"{counted(results, 'result')} inside"] if results else []),
        )

    def walk(self) -> Iterator[Box | Block]:
        """Yields all boxes and blocks inside the block, in preorder."""
        return (item for _, item in self.paths())

    def paths(
        self, around: tuple[Block, ...] = ()
    ) -> Iterator[tuple[tuple[Block, ...], Box | Block]]:
        """Yields (enclosing blocks, item) for all boxes and blocks inside the block."""
        for child in self.children:
            yield (*around, self), child
            if isinstance(child, Block):
                yield from child.paths((*around, self))


@dataclass(frozen=True)
class Arrow:
    """An arrow between two boxes: the values that one box passes to the other.

    Attributes:
        source: The key of the box that computes the values.
        target: The key of the box that reads the values.
        values: The indices of the values, keys of `Outline.values`.
        saved: Whether the values are residuals, which a later pass reads.
        strength: The strongest dependence among the values.
        cut: The kind of lost gradient, or None if no derivative is lost.
    """

    source: int
    target: int
    values: frozenset[int]
    saved: bool = False
    strength: Dependence = Dependence.DIFFERENTIABLE
    cut: str | None = None


@dataclass(frozen=True)
class Outline:
    """The blocks, boxes and arrows of a drawn graph.

    Attributes:
        columns: One block for each pass, in execution order.
        arrows: The arrows between boxes.
        values: Maps the index of each value on an arrow to the value.
        title: The title of the picture.
        alive: The indices of values that use no additional memory, such as inputs.
    """

    columns: tuple[Block, ...]
    arrows: tuple[Arrow, ...]
    values: Mapping[int, Value]
    title: str = ""
    alive: frozenset[int] = frozenset()

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """Returns all blocks inside of the columns; outer blocks come first."""
        inner = (item for column in self.columns for item in column.walk())
        return tuple(item for item in inner if isinstance(item, Block))

    @cached_property
    def around(self) -> dict[int, tuple[Block, ...]]:
        """Maps the key of each box and block to its enclosing blocks, outermost first."""
        paths = (path for column in self.columns for path in column.paths())
        return {item.key: around for around, item in paths}

    def drawn(self, opened: frozenset[int]) -> Iterator[tuple[str, int, Box | Block]]:
        """Yields (event, depth, item) for the drawn boxes and blocks, in program order.

        The event is "box" for a box or a collapsed block; the events "open" and "close" enclose the
        children of a column or an expanded block.
        """

        def visit(item: Box | Block, depth: int) -> Iterator[tuple[str, int, Box | Block]]:
            if isinstance(item, Box) or (depth and item.key not in opened):
                yield "box", depth, item
                return
            yield "open", depth, item
            for child in item.children:
                yield from visit(child, depth + 1)
            yield "close", depth, item

        for column in self.columns:
            yield from visit(column, 0)

    def bytes_of(self, values: Iterable[int]) -> int:
        """Returns the size of `values` in bytes; counts a storage once and omits `alive` values."""
        memories = {memory_of(self.values, v) for v in values if v not in self.alive}
        return sum(self.values[v].bytes for v in memories)

    def kept_text(self, values: Iterable[int]) -> str:
        """Formats the size of the values in bytes; returns `ALIVE` if the size is zero."""
        size = self.bytes_of(values)
        return size_text(size) if size else ALIVE

    def seen_arrows(self, opened: frozenset[int]) -> list[Arrow]:
        """Returns the arrows between visible boxes and collapsed blocks; merges parallel arrows."""
        seen: dict[int, int] = {}  # maps the key of a box to the key of the drawn item
        for event, _, item in self.drawn(opened):
            if event == "box":
                inside = item.boxes if isinstance(item, Block) else (item,)
                seen.update({box.key: item.key for box in inside})
        return merged(self.arrows, seen.__getitem__)

    def opened(self, depth: int | None = None, limit: int = 44) -> frozenset[int]:
        """Returns the keys of the blocks to draw expanded.

        Args:
            depth: The number of expanded levels; None expands as many levels as `limit` allows.
            limit: The maximum number of operations and collapsed blocks if depth is None.
        """
        depth = whole_or_none("Graph", "depth", depth, 0, "levels")
        if depth is None:
            deepest = max(map(len, self.around.values()), default=0)
            views = map(self.opened, range(deepest, 0, -1))
            return next((view for view in views if self._count(view) <= limit), frozenset())
        return frozenset(b.key for b in self.blocks if len(self.around[b.key]) <= depth)

    def _count(self, opened: frozenset[int]) -> int:
        """Returns the number of drawn operations and collapsed blocks."""
        boxes = (item for event, _, item in self.drawn(opened) if event == "box")
        return sum(isinstance(item, Block) or item.kind == "operation" for item in boxes)


def merged(arrows: Iterable[Arrow], end: Callable[[int], int] = int) -> list[Arrow]:
    """Merges parallel arrows; `end` maps the key of a box to the key of the drawn item."""
    ends = lambda arrow: (end(arrow.source), end(arrow.target), arrow.saved)
    result = []
    for (source, target, saved), parallel in grouped(arrows, ends).items():
        if source == target:
            continue
        values = frozenset().union(*(arrow.values for arrow in parallel))
        strength = max(arrow.strength for arrow in parallel)
        cuts = [arrow.cut for arrow in parallel]
        cut = None if None in cuts else cuts[0]
        result.append(Arrow(source, target, values, saved, strength, cut))
    return result


def counted(number: int, noun: str) -> str:
    """Formats a number with a noun, such as "1 operation" and "2 operations"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def size_text(size: float) -> str:
    """Formats a number of bytes in decimal units, such as "512 B", "16 kB" or "1.2 MB"."""
    if size < 1000:
        return f"{size:.0f} B"
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.5:
            return f"{size:.1f} {unit}" if size < 9.95 else f"{size:.0f} {unit}"
    return f"{size / 1000:.1f} TB"


def value_text(value: Value) -> str:
    """Formats the shape and dtype of a value, such as "32×384 float32" or "scalar float32"."""
    shape = "×".join(map(str, value.shape))
    return f"{shape} {value.dtype}" if shape else f"scalar {value.dtype}"
