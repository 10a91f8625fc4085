"""What is known not to agree in the sweep over JAX, and why.

Nearly all of it is JAX's own: where a line says "raised", plain JAX raises the same. A defect of
gradtools is no line here but a defect to be mended. What gradtools refuses is the transpose of a
rule that JAX cannot transpose.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

import jax

from tests.support.sweeps import DIFFERS, LEFT_OUT, RAISED, REFUSED, LedgerLine
from tests.support.sweeps.jax_programs import WRITTEN_FOR

_LOOP = "a loop of unknown length has no reverse mode"
_ALONE = f"{_LOOP}, so there is nothing to hold frozen's, by columns of forward mode, against"
_RAGGED = "the transpose of the transpose of a ragged product is not implemented"
_SHAPE = "the derivative to the shape a has no derivative of its own"
_TRACER = "a custom rule inside expn closes over a tracer, so it has no second derivative"
_SINGLE = "the softmax is computed in float32, whatever it is given"
_EIGVECS = "the derivative of eigenvectors must be switched on, in jax.lax.linalg.eig alone"
_SIGN = "z / |z| turns with z; JAX takes its derivative for zero, as that of a real sign"
_PHASE = "an eigenvector is free up to its phase; that of the derivative is not LAPACK's"
_TIE = "where the arguments are equal, the derivatives of max and min are halved at each order"
_CANCELS = "the sign of a complex number in it, whose derivative cancels; JAX has it as zero"
_SINK = "JAX's own forward Jacobian of it raises"
_PRODUCTS = "windows of products have forward mode alone"
_BRANCH = "log(1 - x) is taken at x > 1 too, where it is not used: NaN in reverse mode"

_SECOND = (*("hvp*", "*second order", "jacobian, reverse over forward", "hessian", "grad of jvp"),)


def _none(program: str, reason: str, upstream: str = "") -> LedgerLine:
    return LedgerLine(program, "*", RAISED, reason, upstream)


def _second(
    program: str, reason: str, upstream: str = "", whole: bool = False
) -> tuple[LedgerLine, ...]:
    return tuple(LedgerLine(program, way, RAISED, reason, upstream, whole=whole) for way in _SECOND)


LEDGER: tuple[LedgerLine, ...] = (
    _none("lax.zeta", "no derivative; jax.scipy.special has one to the second argument"),
    _none("lax.nextafter", "no derivative", "jax#38679"),
    _none("numpy.nextafter", "no derivative", "jax#38679"),
    _none("numpy.spacing", "no derivative", "jax#38679"),
    _none("lax.scatter_apply", "no derivative: the function may be anything"),
    _none("lax.composite", "no derivative: the author of a composite writes its rule"),
    _none("lax.scaled_dot", "no derivative"),
    _none("numpy.linalg.eig", _EIGVECS, "jax#2748"),
    *(
        _none(f"lax.linalg.{name}", "no derivative")
        for name in (
            *("hessenberg", "schur", "tridiagonal", "symmetric_product", "householder_product"),
            *("cholesky_update", "ormqr"),
        )
    ),
    _none("lax.linalg.qdwh", _LOOP),
    LedgerLine("lax.linalg.qdwh", "frozen, second order", LEFT_OUT, _ALONE),
    LedgerLine("lax.linalg.qdwh", "rule by*", REFUSED, _LOOP, whole=True),
    _none("lax.pmax", "no derivative"),
    _none("lax.pmin", "no derivative"),
    *_second("numpy.linalg.eigvals", _EIGVECS, "jax#2748"),
    *_second("numpy.roots", _EIGVECS, "jax#2748"),
    *_second("scipy.special.exp1", _TRACER),
    *_second("scipy.special.expn", _TRACER),
    *_second("lax.igamma*", _SHAPE, "jax#7922", whole=True),
    *_second("scipy.special.gammainc*", _SHAPE, "jax#7922"),
    LedgerLine("scipy.special.spence", "*", DIFFERS, _BRANCH, "jax#40709"),
    *(
        LedgerLine("scipy.special.betaln", way, DIFFERS, _TIE, "jax#34353", whole=True)
        for way in _SECOND
    ),
    LedgerLine("*.sign", "*", REFUSED, _SIGN, dtype="complex128", whole=True),
    LedgerLine("*.sign", "rule by*", DIFFERS, _SIGN, dtype="complex128", whole=True),
    LedgerLine("numpy.geomspace", "*", REFUSED, _CANCELS, dtype="complex128", whole=True),
    *(
        LedgerLine("scipy.special.hyp?f1", way, RAISED, _LOOP, whole=True)
        for way in (
            *("*reverse over reverse", "jacobian, reverse over forward", "grad of jvp"),
            *("checkpoint, second order", "rule by vjp, second order"),
        )
    ),
    LedgerLine("lax.ragged_dot*", "*reverse over reverse", RAISED, _RAGGED),
    LedgerLine("lax.ragged_dot*", "checkpoint, second order", RAISED, _RAGGED, whole=True),
    *(
        LedgerLine("lax.ragged_dot*", way, RAISED, "vmap takes its first axis alone", whole=True)
        for way in ("jacobian*", "hessian", "chunked")
    ),
    LedgerLine("lax.ragged_dot*", "rule by*", REFUSED, _RAGGED, whole=True),
    LedgerLine("scipy.special.betainc", "*", RAISED, "no derivative to its first two", whole=True),
    LedgerLine("*.linalg.eigh", "*", DIFFERS, _PHASE, dtype="complex128", whole=True),
    *(
        LedgerLine(
            program, "why_zero", DIFFERS, "one of its two outputs is a staircase", whole=True
        )
        for program in ("numpy.divmod", "numpy.modf")
    ),
    *(
        LedgerLine(
            f"scipy.special.{program}",
            "why_zero",
            DIFFERS,
            "the mask of its domain is told as a step",
            whole=True,
        )
        for program in ("kl_div", "rel_entr", "logsumexp")
    ),
    LedgerLine("lax.reduce", "*", RAISED, "no derivative to the initial value", whole=True),
    LedgerLine("lax.reduce_window", "*", RAISED, _PRODUCTS, "jax#7815", whole=True),
    LedgerLine("lax.reduce_window", "rule by*", REFUSED, _PRODUCTS, "jax#7815", whole=True),
    *(
        LedgerLine("lax.dce_sink", way, RAISED, _SINK, whole=True)
        for way in ("jacobian, forward", "jacobian, reverse over forward", "hessian")
    ),
    LedgerLine(
        "lax.dce_sink", "checkpoint*", REFUSED, "jax.checkpoint takes no effects", whole=True
    ),
    LedgerLine("lax.while_loop", "*vjp", RAISED, _LOOP),
    *(x for x in _second("lax.while_loop", _LOOP) if "second order" not in x.way),
    LedgerLine("lax.while_loop", "frozen, second order", LEFT_OUT, _ALONE),
    LedgerLine("lax.while_loop", "checkpoint, second order", RAISED, _LOOP, whole=True),
    LedgerLine("lax.while_loop", "jacobian, reverse", RAISED, _LOOP, whole=True),
    LedgerLine("lax.while_loop", "chunked", RAISED, _LOOP, whole=True),
    LedgerLine("lax.while_loop", "rule by*", REFUSED, _LOOP, whole=True),
    LedgerLine("lax.while_loop", "rule by vjp, *", RAISED, _LOOP, whole=True),
    LedgerLine(
        "lax.scatter_mul", "*", RAISED, "no derivative where an index comes twice", whole=True
    ),
    LedgerLine("numpy.linalg.svd", "*", DIFFERS, _PHASE, dtype="complex128", whole=True),
    LedgerLine("lax.sort*", "why_zero", DIFFERS, "a value's key only sorts it", whole=True),
    LedgerLine("nn.dot_product_attention", "*", DIFFERS, _SINGLE, "jax#37422"),
)


# What a later JAX has mended, and what is wrong in it alone.
_MENDED = (
    *("lax.nextafter", "numpy.nextafter", "numpy.spacing", "scipy.special.exp*"),
    *("*.sign", "numpy.geomspace"),
)
_LATER = (
    LedgerLine("*", "table", LEFT_OUT, "newer than the table of arguments"),
    *_second("scipy.special.erfcx", "JAX 0.12 selects between two shapes in its derivative"),
)


def lines() -> tuple[LedgerLine, ...]:
    """The ledger of this version of JAX."""
    if jax.__version_info__ <= WRITTEN_FOR:
        return LEDGER
    kept = [k for k in LEDGER if not any(fnmatchcase(k.program, p) for p in _MENDED)]
    return (*kept, *_LATER)
