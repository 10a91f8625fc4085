"""Notation of operations on whole arrays, and the notes that explain it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gradtools.seeing.formula import typesetting as ts
from gradtools.seeing.formula.algebra import contracts
from gradtools.seeing.formula.expressions import Expr
from gradtools.seeing.formula.typesetting import (
    ATOM,
    POWER,
    PRODUCT,
    SUM,
    Written,
    function,
    join,
    number,
    summed,
    superscript,
)

if TYPE_CHECKING:
    from gradtools.seeing.formula.writing import ExpressionWriter


def _along(name: str, latex: str = "") -> Callable[[ExpressionWriter, Expr], Written]:
    """A function along one axis."""

    def form(w: ExpressionWriter, x: Expr) -> Written:
        below = w.axis_names(x.args[0], [x["axis"]]) if x.args[0].rank > 1 else ""
        shown = name + ("←" if x.get("reverse") else "")
        return function(shown, [w.whole(a) for a in x.args], below, latex)

    return form


def _reduction(name: str) -> Callable[[ExpressionWriter, Expr], Written]:
    """A function over axes."""

    def form(w: ExpressionWriter, x: Expr) -> Written:
        a = x.args[0]
        axes = x["axes"] if "axes" in dict(x.attributes) else (x["axis"],)
        below = w.axis_names(a, axes) if len(axes) < a.rank else ""
        return function(name, [w.whole(a)], below)

    return form


def _norm(w: ExpressionWriter, x: Expr) -> Written:
    inner = w.whole(x.args[0])
    below = w.axis_names(x.args[0], x["axes"]) if len(x["axes"]) < x.args[0].rank else ""
    low = f"_{{{below}}}" if below else ""
    return Written(
        f"‖{inner.text}‖" + (ts.below(below) if below else ""),
        rf"\left\|{inner.latex}\right\|{low}",
    )


def _deviation(w: ExpressionWriter, x: Expr) -> Written:
    a, eps = x.args[0], x["eps"]
    axes = x["axes"]
    below = w.axis_names(a, axes) if len(axes) < a.rank else ""
    inner = function("var", [w.whole(a)], below)
    if eps:
        inner = summed([inner, number(eps)])
        return Written(f"√({inner.text})", rf"\sqrt{{{inner.latex}}}", POWER)
    return Written(f"√{inner.text}", rf"\sqrt{{{inner.latex}}}", POWER)


def _standardize(w: ExpressionWriter, x: Expr) -> Written:
    a = x.args[0]
    below = w.axis_names(a, x["axes"]) if len(x["axes"]) < a.rank else ""
    if x["eps"]:
        w.note(
            "standardize(x) = (x - mean(x)) / √(var(x) + ε), "
            f"ε = {number(x['eps']).text}, over the axes below"
        )
    return function("standardize", [w.whole(a)], below)


def _inverse(w: ExpressionWriter, x: Expr) -> Written:
    return _inverse_of(w, x.args[0])


def _pseudoinverse(w: ExpressionWriter, x: Expr) -> Written:
    w.note("A⁺: the Moore-Penrose inverse; its derivative is that of a constant rank")
    return superscript(w.whole(x.args[0]), "⁺", "+")


def _inverse_of(w: ExpressionWriter, a: Expr) -> Written:
    """The inverse of a matrix; of a transpose it is A^-T, of a conjugate transpose A^-H."""
    turned = _transposed_leaf(a) if a not in w.names else None
    if turned is None:
        return superscript(w.whole(a), "⁻¹", "-1")
    if turned.op == "conj":
        return superscript(w.whole(turned.args[0]), "⁻ᴴ", "-H")
    return superscript(w.whole(turned), "⁻ᵀ", r"-\top")


def _transposed_leaf(a: Expr) -> Expr | None:
    if a.op != "einsum" or len(a.args) != 1 or a["coefficient"] != 1 or contracts(a):
        return None
    n = a.rank
    expected = (*range(n - 2), n - 1, n - 2)
    return a.args[0] if a["labels"][0] == expected else None


def _solve(w: ExpressionWriter, x: Expr) -> Written:
    a, b = x.args
    return join([_inverse_of(w, a), w.whole(b).at(PRODUCT)], " ", " ", PRODUCT)


def _fourier(w: ExpressionWriter, x: Expr) -> Written:
    a = x.args[0]
    below = w.axis_names(a, x["axes"]) if len(x["axes"]) < a.rank else ""
    w.note("ℱ: the discrete Fourier transform without a factor; ℱᴴ: its adjoint, n ℱ⁻¹")
    name, latex = ("ℱ", r"\mathcal{F}") if x["sign"] < 0 else ("ℱᴴ", r"\mathcal{F}^{H}")
    return function(name, [w.whole(a)], below, latex)


def _geometry(x: Expr) -> str:
    said = []
    if any(s != 1 for s in x["stride"]):
        said.append(f"stride {_list(x['stride'])}")
    if any(p != (0, 0) for p in x["padding"]):
        same = all(a == b for a, b in x["padding"])
        said.append(f"padding {_list([a for a, _ in x['padding']] if same else x['padding'])}")
    if any(d != 1 for d in x["dilation"]):
        said.append(f"dilation {_list(x['dilation'])}")
    if x.get("groups", 1) != 1:
        said.append(f"groups {x['groups']}")
    return ", ".join(said)


def _list(values: Sequence[Any]) -> str:
    return str(values[0]) if len(set(values)) == 1 else "x".join(map(str, values))


def _convolution(w: ExpressionWriter, x: Expr) -> Written:
    said = _geometry(x)
    w.note("conv(X, W): convolution (cross-correlation)" + (f" with {said}" if said else ""))
    return function("conv", [w.whole(a) for a in x.args])


def _convolution_input(w: ExpressionWriter, x: Expr) -> Written:
    w.note("convᵀ(Ȳ, W): its adjoint in the input X, the transposed convolution")
    return function("convᵀ", [w.whole(a) for a in x.args], latex=r"\operatorname{conv}^{\top}")


def _convolution_weight(w: ExpressionWriter, x: Expr) -> Written:
    w.note("corr(X, Ȳ): its adjoint in the weight W, the correlation of input and cotangent")
    return function("corr", [w.whole(a) for a in x.args])


def _pool(name: str, note: str) -> Callable[[ExpressionWriter, Expr], Written]:
    def form(w: ExpressionWriter, x: Expr) -> Written:
        w.note(f"{note}; windows {_list(x['window'])}, stride {_list(x['stride'])}")
        args = [w.whole(a) for a in x.args]
        if len(args) == 1:
            return function(name, args)
        inside = Written(
            f"{args[0].text}; {args[1].text}", rf"{args[0].latex};\, {args[1].latex}", SUM
        )
        return function(name, [inside])

    return form


def _ranges(x: Expr, lows: Sequence[int], highs: Sequence[int], strides=None) -> str:
    strides = strides or (1,) * len(lows)
    said = []
    for n, a, b, s in zip(x.shape, lows, highs, strides, strict=True):
        if (a, b, s) == (0, n, 1):
            said.append(":")
        elif b == a + 1:
            said.append(str(a))
        else:
            said.append(f"{a or ''}:{'' if b == n else b}" + (f":{s}" if s != 1 else ""))
    return ", ".join(said)


def _slice(w: ExpressionWriter, x: Expr) -> Written:
    a = x.args[0]
    where = _ranges(a, x["start"], x["limit"], x["stride"])
    return _part(w.whole(a), Written(where, where))


def _part(x: Written, where: Written) -> Written:
    """Entries of x, in square brackets."""
    x = x.at(ATOM)
    return Written(f"{x.text}[{where.text}]", rf"{x.latex}\left[{where.latex}\right]")


def _pad(w: ExpressionWriter, x: Expr) -> Written:
    a = x.args[0]
    highs = [
        low + n + max(n - 1, 0) * i
        for n, low, i in zip(a.shape, x["low"], x["interior"], strict=True)
    ]
    where = _ranges(x, x["low"], highs, [i + 1 for i in x["interior"]])
    w.note("into[...](x): zeros with x at these places")
    inner = w.whole(a)
    return Written(
        f"into[{where}]({inner.text})",
        rf"\operatorname{{into}}_{{[{where}]}}\left({inner.latex}\right)",
    )


def _concatenate(w: ExpressionWriter, x: Expr) -> Written:
    pieces = [w.whole(a) for a in x.args]
    between = "; " if x["axis"] == 0 else ", "
    latex = r";\; " if x["axis"] == 0 else r",\; "
    inside = join(pieces, between, latex, SUM)
    return Written(f"[{inside.text}]", rf"\left[{inside.latex}\right]")


def _places(w: ExpressionWriter, x: Expr, whole_rank: int, indices: Sequence[Expr]) -> Written:
    said: list[Written] = [Written(":", ":")] * whole_rank
    for axis, i in zip(x["axes"], indices, strict=True):
        said[axis] = w.whole(i)
    while said and said[-1].text == ":":
        said.pop()
    return join(said, ", ", ", ", SUM)


def _index(w: ExpressionWriter, x: Expr) -> Written:
    where = _places(w, x, x.args[0].rank, x.args[1:])
    return _part(w.whole(x.args[0]), where)


def _index_add(w: ExpressionWriter, x: Expr) -> Written:
    where = _places(w, x, x.rank, x.args[1:])
    w.note("add_at[i](u): zeros with u added at the places i")
    return _at("add_at", where, [w.whole(x.args[0])])


def _index_set(w: ExpressionWriter, x: Expr) -> Written:
    where = _places(w, x, x.rank, x.args[2:])
    w.note("set_at[i](x, u): x with u at the places i")
    return _at("set_at", where, [w.whole(a) for a in x.args[:2]])


def _at(name: str, where: Written, args: list[Written]) -> Written:
    inside = join(args, ", ", ", ", SUM)
    command = name.replace("_", r"\_")
    return Written(
        f"{name}[{where.text}]({inside.text})",
        rf"\operatorname{{{command}}}_{{[{where.latex}]}}\left({inside.latex}\right)",
    )


def _take_along(w: ExpressionWriter, x: Expr) -> Written:
    where = w.whole(x.args[1])
    return _part(w.whole(x.args[0]), where)


def _put_along(w: ExpressionWriter, x: Expr) -> Written:
    w.note("add_at[i](u): zeros with u added at the places i")
    return _at("add_at", w.whole(x.args[1]), [w.whole(x.args[0])])


def _along_set(w: ExpressionWriter, x: Expr) -> Written:
    w.note("set_at[i](x, u): x with u at the places i")
    return _at("set_at", w.whole(x.args[1]), [w.whole(x.args[0]), w.whole(x.args[2])])


def _window(name: str, arrays: int, note: str) -> Callable[[ExpressionWriter, Expr], Written]:
    def form(w: ExpressionWriter, x: Expr) -> Written:
        w.note(note)
        where = join([w.whole(s) for s in x.args[arrays:]], ", ", ", ", SUM)
        return _at(name, where, [w.whole(a) for a in x.args[:arrays]])

    return form


def _reshape(w: ExpressionWriter, x: Expr) -> Written:
    if x.shape == tuple(n for n in x.args[0].shape if n != 1):
        return w.whole(x.args[0])
    shape = "x".join(map(str, x.shape))
    inner = w.whole(x.args[0])
    w.note("reshape: row-major")
    return function("reshape", [inner], f"{shape}", r"\operatorname{reshape}")


def _triangle(w: ExpressionWriter, x: Expr) -> Written:
    name = "triu" if x["upper"] else "tril"
    return function(name, [w.whole(x.args[0])], str(x["offset"]) if x["offset"] else "")


def _half(w: ExpressionWriter, x: Expr) -> Written:
    w.note("half(X): the lower triangle of X with half of its diagonal (Murray 2016, for Cholesky)")
    return function("half", [w.whole(x.args[0])])


def _gaps(w: ExpressionWriter, x: Expr) -> Written:
    w.note("gaps(X; λ): Xᵢⱼ / (λⱼ - λᵢ), and 0 on the diagonal (Giles 2008, for eigenvectors)")
    inner, values = (w.whole(a) for a in x.args)
    return Written(
        f"gaps({inner.text}; {values.text})",
        rf"\operatorname{{gaps}}\left({inner.latex}; {values.latex}\right)",
    )


def _array(w: ExpressionWriter, x: Expr) -> Written:
    return Written("c", "c")


def _log_determinant(w: ExpressionWriter, x: Expr) -> Written:
    a = w.whole(x.args[0]).at(POWER)
    return Written(f"log |det {a.text}|", rf"\log\left|\det {a.latex}\right|", POWER)


def _opaque(w: ExpressionWriter, x: Expr) -> Written:
    name = x["name"]
    inside = join([w.whole(a) for a in x.args], ", ", ", ", SUM)
    which = f"[{x['output']}]" if len(x["signature"]) > 1 else ""
    latex = name.replace("_", r"\_").replace("^*", "")
    star = "^{*}" * name.count("^*")
    return Written(
        f"⚠{name}({inside.text}){which}",
        rf"\operatorname{{{latex}}}{star}\left({inside.latex}\right){which}",
    )


def _ruled(w: ExpressionWriter, x: Expr) -> Written:
    return w.whole(x.args[x["output"]])


def _cond(w: ExpressionWriter, x: Expr) -> Written:
    """One case for each branch, the operands written in."""
    cases = []
    for branch in x["branches"]:
        w.names.update(zip(branch.inputs, [w.whole(a) for a in x.args[1:]], strict=True))
        cases.append(w.whole(branch.outputs[x["output"]]))
    index = w.whole(x.args[0])
    boolean = x.args[0].kind == "boolean"
    shown = list(enumerate(cases))[::-1] if boolean else list(enumerate(cases))
    said = [index.text if boolean else f"{index.text} = {k}" for k, _ in shown[:-1]]
    text = "; ".join(f"{c.text} if {s}" for (_, c), s in zip(shown, said, strict=False))
    rows = [rf"{c.latex} & {s}" for (_, c), s in zip(shown, said, strict=False)]
    rows.append(rf"{shown[-1][1].latex} & \text{{otherwise}}")
    return Written(
        f"{{{text}; {shown[-1][1].text} otherwise}}",
        r"\begin{cases} " + r" \\ ".join(rows) + r" \end{cases}",
    )


_PARTS = {
    "eigh": ("eigenvalues", "eigenvectors"),
    "svd": ("left singular vectors", "singular values", "right singular vectors"),
    "qr": ("Q", "R"),
}


def _decomposition(w: ExpressionWriter, x: Expr) -> Written:
    inner = w.whole(x.args[0])
    part = _PARTS[x.op][x["output"]]
    return Written(f"{part} of {inner.text}", rf"\text{{{part} of }} {inner.latex}", SUM)


def _iota(w: ExpressionWriter, x: Expr) -> Written:
    n = x.shape[x["axis"]]
    return Written(f"(0..{n - 1})", rf"(0, \dots, {n - 1})")


ARRAY_FORMS: dict[str, Callable[[ExpressionWriter, Expr], Written]] = {
    "array": _array,
    "iota": _iota,
    "identity": lambda w, x: Written("I", "I"),
    "reshape": _reshape,
    "slice": _slice,
    "pad": _pad,
    "concatenate": _concatenate,
    "one_hot": lambda w, x: function("onehot", [w.whole(x.args[0])]),
    "index": _index,
    "index_add": _index_add,
    "index_set": _index_set,
    "take_along": _take_along,
    "put_along": _put_along,
    "along_set": _along_set,
    "dynamic_slice": _window("window", 1, "window[i](x): the part of x that starts at i"),
    "dynamic_pad": _window("into", 1, "into[i](u): zeros with u in the window that starts at i"),
    "dynamic_update": _window(
        "set_at", 2, "set_at[i](x, u): x with u in the window that starts at i"
    ),
    "flip": lambda w, x: function(
        "flip", [w.whole(x.args[0])], w.axis_names(x, x["axes"]) if x.rank > 1 else ""
    ),
    "roll": lambda w, x: function("roll", [w.whole(x.args[0])], _list(x["shifts"])),
    **{name: _along(name) for name in ("softmax", "cumsum", "cumprod", "argsort")},
    "log_softmax": _along("log softmax", r"\log\operatorname{softmax}"),
    "logcumsumexp": _along("logcumsumexp"),
    "cumargmax": _along("cumargmax"),
    **{name: _reduction(name) for name in ("max", "min", "prod", "any", "all", "logsumexp")},
    "argmax": _reduction("argmax"),
    "variance": _reduction("var"),
    "deviation": _deviation,
    "standardize": _standardize,
    "norm": _norm,
    "convolution": _convolution,
    "convolution_input": _convolution_input,
    "convolution_weight": _convolution_weight,
    "max_pool": _pool("maxpool", "maxpool: the greatest of each window"),
    "max_unpool": _pool("unpool", "unpool(g; x): g put back to where x is greatest"),
    "max_pick": _pool("pick", "pick(u; x): u where x is greatest in each window"),
    "sum_pool": _pool("sumpool", "sumpool: the sum of each window"),
    "sum_unpool": _pool("sumpoolᵀ", "sumpoolᵀ: its adjoint"),
    "triangle": _triangle,
    "half": _half,
    "gaps": _gaps,
    "det": lambda w, x: function("det", [w.whole(x.args[0])]),
    "logabsdet": _log_determinant,
    "sign_det": lambda w, x: function("sgn det", [w.whole(x.args[0])]),
    "inverse": _inverse,
    "pinv": _pseudoinverse,
    "solve": _solve,
    "fourier": _fourier,
    "opaque": _opaque,
    **dict.fromkeys(_PARTS, _decomposition),
    "cond": _cond,
    "ruled": _ruled,
}
