"""Operations of other arguments than they were made of, simplified again."""

from __future__ import annotations

from gradtools.seeing.formulas.algebra.complex_numbers import conj, imag, real
from gradtools.seeing.formulas.algebra.elementwise import apply, power
from gradtools.seeing.formulas.algebra.products import product
from gradtools.seeing.formulas.algebra.reshapes import reshape
from gradtools.seeing.formulas.algebra.sums import add
from gradtools.seeing.formulas.expressions import Expr, expr
from gradtools.seeing.formulas.operation_record import is_elementwise


def rebuild(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """The same operation of other arguments."""
    if node.op == "einsum":
        coefficient = node["coefficient"]
        return product(args, node["labels"], range(node.rank), node.shape, coefficient)
    if node.op == "power":
        return power(args[0], node["exponent"])
    if node.op == "add":
        return add(args)
    if node.op == "reshape":
        return reshape(args[0], node.shape)
    if node.op in _PARTS:
        return _PARTS[node.op](args[0])
    if is_elementwise(node):
        return apply(node.op, *args, **dict(node.attributes))
    return expr(node.op, args, node.shape, node.kind, **dict(node.attributes))


_PARTS = {"conj": conj, "real": real, "imag": imag}
