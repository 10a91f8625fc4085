"""Defines the programs of the JAX sweep: arguments for each public function.

The functions are found by walking JAX's namespaces. The table lists the arguments at which each
function is differentiated, and the names of functions without derivatives. The sweep reports other
names as new in this version of JAX. The arguments are not close to kinks, poles, branch cuts or
ties.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, nn
from jax.numpy import fft, linalg
from jax.scipy import special

NAMESPACES: dict[str, ModuleType] = {
    "lax": lax,
    "lax.linalg": lax.linalg,
    "numpy": jnp,
    "numpy.linalg": linalg,
    "numpy.fft": fft,
    "scipy.special": special,
    "nn": nn,
}
WRITTEN_FOR = (0, 10, 2)
"""The version of JAX for which the table of names is complete."""


def _away(rng: np.random.Generator, shape: tuple[int, ...], low: float, high: float) -> np.ndarray:
    """Return distinct numbers of either sign with absolute values between `low` and `high`."""
    n = int(np.prod(shape))
    sizes = low + (high - low) * (rng.permutation(n) + rng.uniform(0.3, 0.7, n)) / max(n, 1)
    return (rng.choice([-1.0, 1.0], n) * sizes).reshape(shape)


def _between(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.rint(_away(rng, shape, 1.0, 3.0)) + rng.uniform(0.15, 0.35, shape)


def _spd(rng: np.random.Generator, n: int) -> np.ndarray:
    a = rng.normal(size=(n, n))
    return a @ a.T + n * np.eye(n)


def _near_eye(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    n, m = shape[-2:]
    return 0.3 * rng.normal(size=shape) + np.diag(1.5 + np.arange(max(n, m)))[:n, :m]


def _complex(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return _away(rng, shape, 0.25, 1.5) + 1j * _away(rng, shape, 0.2, 1.1)


DRAWS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "a": lambda rng, shape: _away(rng, shape, 0.25, 1.6),  # Of either sign.
    "p": lambda rng, shape: np.abs(_away(rng, shape, 0.3, 1.8)),  # Positive.
    "u": lambda rng, shape: _away(rng, shape, 0.15, 0.8),  # Between -1 and 1.
    "i": lambda rng, shape: np.abs(_away(rng, shape, 0.15, 0.8)),  # Between 0 and 1.
    "g": lambda rng, shape: 1.0 + np.abs(_away(rng, shape, 0.3, 1.5)),  # Greater than 1.
    "l": lambda rng, shape: 2.0 + np.abs(_away(rng, shape, 0.3, 1.5)),  # Greater than 2.
    "b": _between,  # Numbers away from integers and half-integers.
    "s": lambda rng, shape: _spd(rng, *shape),  # Symmetric positive definite.
    "e": _near_eye,  # Well-conditioned matrices with simple eigenvalues.
    "c": _complex,
    "r": lambda rng, _: np.array([2.3, -1.6, 3.1]),  # for remainders
    "d": lambda rng, _: np.array([0.9, 0.7, -1.2]),
    "o": lambda rng, _: np.ones(3),
}


@dataclass(frozen=True)
class Case:
    """A function and arguments, all of which are differentiated.

    Attributes:
        f: A function of the arguments in `draws`; its closed-over values are constants.
        draws: For each argument, a key of `DRAWS` and the shape, such as "a23". The string ends
            with "real" if the function does not support complex arguments.
        program: The name of the function, with its namespace.
        sample: The index of this case among all cases of the function.
    """

    f: Callable[..., Any]
    draws: str
    program: str = ""
    sample: int = 0

    def _drawn(self, rng: np.random.Generator) -> list[np.ndarray]:
        codes = self.draws.removesuffix(" real").split()
        return [DRAWS[kind](rng, tuple(map(int, shape))) for kind, *shape in codes]

    def arguments(self, dtype: str) -> list[np.ndarray]:
        """Return the arguments in float64 or complex128, which have the same values in each run."""
        rng = np.random.default_rng(crc32(f"{self.program} {self.sample}".encode()))
        real = self._drawn(rng)
        if dtype == "float64" or any(np.iscomplexobj(x) for x in real):
            return real
        return [x + 1j * _away(rng, x.shape, 0.2, 0.6) for x in real]

    @property
    def complex_only(self) -> bool:
        """Return whether the arguments are always complex."""
        return "c" in {code[0] for code in self.draws.split()}


_TABLE: dict[str, list[Case]] = {}


def _absent(*_: Any) -> Any:
    raise NotImplementedError("this version of JAX lacks the function")


def case(program: str, draws: str, f: Callable[..., Any]) -> None:
    """Register a case of a function; f closes over its other arguments."""
    cases = _TABLE.setdefault(program, [])
    cases.append(Case(f, draws, program, len(cases)))


# Functions that are differentiated with respect to all arguments: namespace, draws, names.
PLAIN = """
lax a3: abs asinh atan cbrt conj cos cosh erf erfc exp exp2 expm1 logistic neg reciprocal sign sin
    sinh square tan tanh bessel_i0e bessel_i1e
lax b3: ceil floor round
lax p3: log log1p rsqrt sqrt
lax p3 real: digamma lgamma
lax u3: acos asin atanh
lax u3 real: erf_inv
lax g3: acosh
lax a3 a3: add sub mul div
lax a3 a3 real: max min atan2
lax r d real: rem
lax p3 a3: pow
lax a3 a3 real: complex
lax c3: imag real
lax p3 p3 real: igamma igammac
lax u3 a3 g3 real: clamp
numpy a3: abs absolute arcsinh arctan asinh atan cbrt conj conjugate cos cosh deg2rad degrees exp
    exp2 expm1 fabs i0 negative positive rad2deg radians real reciprocal sign sin sinc sinh square
    tan tanh nan_to_num
numpy b3: around ceil floor rint round trunc
numpy p3: log log10 log1p log2 sqrt
numpy u3: acos arccos asin arcsin atanh arctanh
numpy g3: acosh arccosh
numpy c3: angle imag
numpy a3 a3: add subtract multiply divide true_divide logaddexp logaddexp2
numpy a3 a3 real: arctan2 atan2 hypot maximum minimum fmax fmin copysign heaviside
numpy r d real: fmod mod remainder floor_divide divmod
numpy p3 a3: pow power float_power
numpy a3 u3 g3 real: clip
scipy.special p3 real: digamma gamma gammaln loggamma entr factorial
scipy.special a3 real: erf erfc erfcx expit i0 i0e i1 i1e
scipy.special a3 real: log_ndtr ndtr dawsn
scipy.special p3 real: exp1 expi sici fresnel spence
scipy.special i3 real: logit ndtri
scipy.special u3 real: erfinv
scipy.special c3: wofz
scipy.special p3 p3 real: beta betaln kl_div rel_entr poch
scipy.special p3 p3 real: xlogy xlog1py boxcox boxcox1p
scipy.special a3 a3 real: owens_t
scipy.special l3 u3 real: comb
scipy.special p3 p3 i3 real: betainc
scipy.special p3 p3 real: gammainc gammaincc
scipy.special p3 p3 u3 real: hyp1f1
scipy.special a23: log_softmax softmax logsumexp
nn a3: celu elu gelu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu log_sigmoid
    mish relu relu6 selu sigmoid silu soft_sign softplus sparse_plus sparse_sigmoid squareplus
    swish tanh
nn a23: log_softmax softmax logsumexp logmeanexp standardize
lax a4 a4: sort_key_val
numpy a5 real: max amax min amin ptp median nanmax nanmin nanmedian
numpy a4: cumsum cumprod nancumsum nancumprod cumulative_sum cumulative_prod
numpy a4: average
numpy a4: trapezoid diff ediff1d gradient
numpy a24: cov corrcoef
numpy a4: sort sort_complex
numpy a3: array asarray copy atleast_1d atleast_2d atleast_3d
numpy a23: ravel transpose flip fliplr flipud rot90 matrix_transpose
numpy a13: squeeze
numpy a33: diag diagonal trace tril triu
numpy a3: diag diagflat vander
numpy a3 a3: dot inner vdot vecdot convolve correlate outer kron
numpy a3 a3: cross
numpy a222 a222: matmul tensordot
numpy a23 a32: dot matmul
numpy a23 a3: matvec
numpy a2 a23: vecmat
numpy a3: poly polyder polyint
numpy a3 a3: polyadd polysub polymul polyval
numpy a4 a2: polydiv
lax.linalg s3: cholesky eigh
lax.linalg e33: lu hessenberg schur
lax.linalg s3: tridiagonal
lax.linalg e32 real: qdwh
lax.linalg a32 s3 real: symmetric_product
lax.linalg a32 u2: householder_product
lax.linalg s3 a3 real: cholesky_update
lax.linalg u3 g3 u3 a31 real: tridiagonal_solve
numpy.linalg s3: cholesky
numpy.linalg e33: det inv slogdet
numpy.linalg e222: det inv
numpy.linalg s3: eigh eigvalsh
numpy.linalg e33: eig eigvals
numpy.linalg e32: qr pinv cond
numpy.linalg e33: qr
numpy.linalg e32: svdvals
numpy.linalg e33 a3: solve
numpy.linalg a4: norm vector_norm
numpy.linalg e23: norm matrix_norm
numpy.linalg a3 a3: cross outer vecdot
numpy.linalg a23 a32: matmul
numpy.linalg a222 a222: tensordot
numpy.linalg a33: diagonal trace matrix_transpose
numpy.fft a4: fft ifft rfft ihfft
numpy.fft a24: fft2 fftn ifft2 ifftn rfft2 rfftn
numpy.fft c3: irfft hfft
numpy.fft c23: irfft2 irfftn
numpy.fft a4: fftshift ifftshift
numpy a3 a3: broadcast_arrays meshgrid
"""
for _row in PLAIN.strip().replace("\n   ", "").splitlines():
    _where, _, _names = _row.partition(": ")
    _space, _, _draws = _where.partition(" ")
    for _name in _names.split():
        case(f"{_space}.{_name}", _draws, getattr(NAMESPACES[_space], _name, _absent))


case("lax.integer_pow", "a3", lambda x: lax.integer_pow(x, 3))
case("lax.integer_pow", "a3", lambda x: lax.integer_pow(x, -2))
case("lax.pow", "a3", lambda x: lax.pow(x, 3))
case("lax.polygamma", "p3 real", lambda x: lax.polygamma(jnp.full(3, 1.0), x))
case("lax.zeta", "p3 real", lambda x: lax.zeta(jnp.full(3, 2.5), x))
case("lax.igamma", "p3 real", lambda x: lax.igamma(jnp.array([0.7, 1.3, 2.1]), x))
case("lax.igammac", "p3 real", lambda x: lax.igammac(jnp.array([0.7, 1.3, 2.1]), x))
case(
    "lax.betainc", "i3 real", lambda x: lax.betainc(jnp.array([0.7, 1.3, 2.1]), jnp.full(3, 1.5), x)
)
case("lax.reduce_precision", "a3 real", lambda x: lax.reduce_precision(x, 11, 52))
case("lax.nextafter", "a3 real", lambda x: lax.nextafter(x, x + 1))

case("numpy.power", "a3", lambda x: jnp.power(x, 3))
case("numpy.pow", "a3", lambda x: x**2)

case("scipy.special.betaln", "o real", lambda x: special.betaln(x, jnp.ones(3)))
case(
    "scipy.special.betainc",
    "i3 real",
    lambda x: special.betainc(jnp.array([0.7, 1.3, 2.1]), 1.5, x),
)
case("scipy.special.expn", "p3 real", lambda x: special.expn(2, x))
case("scipy.special.gammainc", "p3 real", lambda x: special.gammainc(1.3, x))
case("scipy.special.gammaincc", "p3 real", lambda x: special.gammaincc(1.3, x))
case("scipy.special.gammasgn", "a3 real", special.gammasgn)
case("scipy.special.multigammaln", "g3 real", lambda x: special.multigammaln(x, 2))
case("scipy.special.polygamma", "p3 real", lambda x: special.polygamma(1, x))
case("scipy.special.zeta", "p3 real", lambda x: special.zeta(2.5, x))
case("scipy.special.hyp1f1", "u3 real", lambda x: special.hyp1f1(1.3, 2.1, x))
case("scipy.special.hyp2f1", "u3 real", lambda x: special.hyp2f1(0.7, 1.3, 2.1, x))
case("scipy.special.bessel_jn", "p3 real", lambda x: special.bessel_jn(x, v=2, n_iter=20))
case(
    "scipy.special.sph_harm_y",
    "p1 p1 real",
    lambda a, b: special.sph_harm_y(jnp.array([2]), jnp.array([1]), a, b, n_max=2),
)
case("scipy.special.logsumexp", "a23 p23", lambda x, b: special.logsumexp(x, b=b, axis=0))

case("nn.gelu", "a3", lambda x: nn.gelu(x, approximate=False))
case("nn.log1mexp", "p3 real", lambda x: nn.log1mexp(x))
case("nn.softmax", "a23", lambda x: nn.softmax(x, where=jnp.array([True, False, True])))
case("nn.glu", "a24", nn.glu)
case(
    "nn.dot_product_attention",
    "a1212 a1312 a1312",
    lambda q, k, v: nn.dot_product_attention(q, k, v),
)
case(
    "nn.dot_product_attention",
    "a1312 a1312 a1312 a1133",
    lambda q, k, v, b: nn.dot_product_attention(q, k, v, bias=b, is_causal=True),
)

# --- reductions and scans ----------------------------------------------------------------

case("lax.reduce", "a23", lambda x: lax.reduce(x, 0.0, lax.add, (0,)))
case("lax.reduce", "a23", lambda x: lax.reduce(x, 1.0, lax.mul, (1,)))
case("lax.reduce", "a23 real", lambda x: lax.reduce(x, -jnp.inf, lax.max, (1,)))
case("lax.reduce", "u23 u", lambda x, i: lax.reduce(x, i, lambda a, b: a + b + a * b, (1,)))
case("lax.reduce_sum", "a23", lambda x: lax.reduce_sum(x, (0,)))
case("lax.reduce_prod", "a23", lambda x: lax.reduce_prod(x, (1,)))
case("lax.reduce_max", "a23 real", lambda x: lax.reduce_max(x, (1,)))
case("lax.reduce_min", "a23 real", lambda x: lax.reduce_min(x, (1,)))
for _name in ("cumsum", "cumprod", "cumlogsumexp", "cummax", "cummin"):
    _real = "" if _name in ("cumsum", "cumprod") else " real"
    case(f"lax.{_name}", "a4" + _real, getattr(lax, _name))
    _back = partial(getattr(lax, _name), axis=1, reverse=True)
    case(f"lax.{_name}", "a23" + _real, _back)
case("lax.reduce_window", "a4", lambda x: lax.reduce_window(x, 0.0, lax.add, (2,), (1,), "VALID"))
case(
    "lax.reduce_window",
    "a33 real",
    lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME"),
)
case(
    "lax.reduce_window",
    "a4 real",
    lambda x: lax.reduce_window(x, jnp.inf, lax.min, (2,), (2,), "VALID"),
)
case("lax.reduce_window", "a4", lambda x: lax.reduce_window(x, 1.0, lax.mul, (2,), (1,), "SAME"))
case("lax.associative_scan", "a4", lambda x: lax.associative_scan(jnp.multiply, x))
case("lax.top_k", "a5 real", lambda x: lax.top_k(x, 2)[0])
case("lax.approx_max_k", "a5 real", lambda x: lax.approx_max_k(x, 2)[0])
case("lax.sort", "a4", lax.sort)
case("lax.sort", "a32", lambda x: lax.sort(x, dimension=0))
case("lax.sort", "a4 a4", lambda x, y: lax.sort((x, y), num_keys=1))

for _stem in ("sum", "prod", "mean", "std", "var"):
    for _name in (_stem, f"nan{_stem}"):
        case(f"numpy.{_name}", "a23", getattr(jnp, _name))
        case(f"numpy.{_name}", "a23", lambda x, n=_name: getattr(jnp, n)(x, axis=1))
case("numpy.max", "a23 real", lambda x: jnp.max(x, axis=0))
for _stem, _q in (("percentile", 37.0), ("quantile", 0.37)):
    for _name in (_stem, f"nan{_stem}"):
        case(f"numpy.{_name}", "a5 real", lambda x, n=_name, q=_q: getattr(jnp, n)(x, q))
case("numpy.average", "a4 p4", lambda x, w: jnp.average(x, weights=w))
case("numpy.trapezoid", "a4 p4", lambda y, x: jnp.trapezoid(y, jnp.cumsum(x)))

# --- shapes and indices ------------------------------------------------------------------

case("lax.broadcast", "a3", lambda x: lax.broadcast(x, (2,)))
case("lax.broadcast_in_dim", "a3", lambda x: lax.broadcast_in_dim(x, (2, 3), (1,)))
case("lax.concatenate", "a3 a2", lambda x, y: lax.concatenate([x, y], 0))
case("lax.stack", "a3 a3", lambda x, y: lax.stack([x, y]))
case("lax.unstack", "a23", lambda x: lax.unstack(x))
case("lax.expand_dims", "a3", lambda x: lax.expand_dims(x, (1,)))
case("lax.squeeze", "a13", lambda x: lax.squeeze(x, (0,)))
case("lax.reshape", "a23", lambda x: lax.reshape(x, (3, 2)))
case("lax.reshape", "a23", lambda x: lax.reshape(x, (6,), (1, 0)))
case("lax.rev", "a23", lambda x: lax.rev(x, (1,)))
case("lax.transpose", "a23", lambda x: lax.transpose(x, (1, 0)))
case("lax.tile", "a3", lambda x: lax.tile(x, (2,)))
case("lax.split", "a3", lambda x: lax.split(x, (1, 2)))
case("lax.pad", "a3 a", lambda x, v: lax.pad(x, v, [(1, 2, 1)]))
case("lax.pad", "a3 a", lambda x, v: lax.pad(x, v, [(-1, 1, 0)]))
case("lax.slice", "a5", lambda x: lax.slice(x, (1,), (5,), (2,)))
case("lax.index_take", "a3", lambda x: lax.index_take(x, jnp.array([[0, 2]]), (0,)))
case("lax.dynamic_slice", "a4", lambda x: lax.dynamic_slice(x, (1,), (2,)))
case("lax.dynamic_update_slice", "a4 a2", lambda x, u: lax.dynamic_update_slice(x, u, (1,)))
_TAKE = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,))
_PUT = lax.ScatterDimensionNumbers(
    update_window_dims=(), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
)
_AT, _TWICE = np.array([[2], [0]]), np.array([[2], [2]])
case("lax.gather", "a4", lambda x: lax.gather(x, _TWICE, _TAKE, (1,)))
for _name in ("", "_add", "_sub", "_mul", "_max", "_min"):
    _draws = "a4 a2 real" if _name in ("_max", "_min") else "a4 a2"
    _f = partial(getattr(lax, f"scatter{_name}"), dimension_numbers=_PUT)
    _once = {"unique_indices": True} if _name == "_mul" else {}
    case(f"lax.scatter{_name}", _draws, lambda x, u, f=_f, once=_once: f(x, _AT, u, **once))
    case(f"lax.scatter{_name}", _draws, lambda x, u, f=_f: f(x, _TWICE, u))
case(
    "lax.scatter_apply",
    "a4",
    lambda x: lax.scatter_apply(x, jnp.asarray(_AT), jnp.sin, _PUT, update_shape=(2,)),
)
case("lax.select", "a3 a3", lambda x, y: lax.select(jnp.array([True, False, True]), x, y))
case("lax.select_n", "a3 a3 a3", lambda x, y, z: lax.select_n(jnp.array([0, 2, 1]), x, y, z))
case("lax.convert_element_type", "a3", lambda x: lax.convert_element_type(x, jnp.complex128))
case("lax.optimization_barrier", "a3", lax.optimization_barrier)
case("lax.stop_gradient", "a3", lambda x: x * lax.stop_gradient(2.0))
case("lax.composite", "a3", lambda x: lax.composite(jnp.sin, "sweep.sin")(x))
case("lax.platform_dependent", "a3", lambda x: lax.platform_dependent(x, default=jnp.sin))

for _name in "block column_stack concat concatenate dstack hstack stack vstack".split():
    case(f"numpy.{_name}", "a3 a3", lambda x, y, n=_name: getattr(jnp, n)([x, y]))
case("numpy.broadcast_to", "a3", lambda x: jnp.broadcast_to(x, (2, 3)))
case("numpy.expand_dims", "a3", lambda x: jnp.expand_dims(x, 0))
case("numpy.reshape", "a23", lambda x: jnp.reshape(x, (3, 2)))
case("numpy.swapaxes", "a23", lambda x: jnp.swapaxes(x, 0, 1))
case("numpy.roll", "a3", lambda x: jnp.roll(x, 1))
case("numpy.repeat", "a3", lambda x: jnp.repeat(x, 2))
case("numpy.tile", "a3", lambda x: jnp.tile(x, 2))
case("numpy.pad", "a3", lambda x: jnp.pad(x, 1))
for _mode in ("reflect", "wrap", "edge", "linear_ramp", "mean", "maximum", "symmetric"):
    _draws = "a3 real" if _mode == "maximum" else "a3"
    case("numpy.pad", _draws, lambda x, m=_mode: jnp.pad(x, 1, mode=m))
for _name in ("split", "array_split", "hsplit"):
    case(f"numpy.{_name}", "a4", lambda x, n=_name: getattr(jnp, n)(x, 2))
case("numpy.select", "a3 a3", lambda x, y: jnp.select([np.array([True, False, False])], [x], y))
case("numpy.where", "a3 a3", lambda x, y: jnp.where(np.array([True, False, True]), x, y))
case("numpy.take", "a3", lambda x: jnp.take(x, np.array([2, 0, 2])))
case("numpy.take_along_axis", "a3", lambda x: jnp.take_along_axis(x, np.array([2, 0, 2]), 0))
case("numpy.interp", "a3 a4 real", lambda x, f: jnp.interp(x, jnp.array([-2.0, -0.1, 0.1, 2.0]), f))
case(
    "numpy.interp",
    "p4 real",
    lambda xp: jnp.interp(jnp.array([0.4, 1.5]), jnp.cumsum(xp) - 0.2, jnp.array([1.0, 3, -2, 5])),
)

# --- products ----------------------------------------------------------------------------

case("lax.dot", "a23 a32", lax.dot)
case("lax.dot", "a3 a3", lax.dot)
case(
    "lax.dot_general", "a212 a221", lambda x, y: lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,))))
)
case("lax.scaled_dot", "a122 a122 real", lambda x, y: lax.scaled_dot(x, y))
case(
    "lax.conv_general_dilated",
    "a125 a222",
    lambda x, k: lax.conv_general_dilated(x, k, (2,), [(1, 0)], (1,), (2,)),
)
case(
    "lax.conv_general_dilated",
    "a123 a212",
    lambda x, k: lax.conv_general_dilated(x, k, (1,), [(1, 0)], (2,), feature_group_count=2),
)
case(
    "lax.conv_general_dilated_local",
    "a113 a122",
    lambda x, k: lax.conv_general_dilated_local(x, k, (1,), "VALID", (2,)),
)
case(
    "lax.conv_general_dilated_patches",
    "a113",
    lambda x: lax.conv_general_dilated_patches(x, (2,), (1,), "VALID"),
)
case(
    "lax.conv_transpose",
    "a113 a112",
    lambda x, k: lax.conv_transpose(x, k, (2,), "VALID", dimension_numbers=("NCH", "OIH", "NCH")),
)
case("lax.ragged_dot", "a32 a222", lambda x, y: lax.ragged_dot(x, y, jnp.array([2, 1])))
case(
    "lax.ragged_dot_general",
    "a32 a222",
    lambda x, y: lax.ragged_dot_general(
        x,
        y,
        jnp.array([2, 1]),
        lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0]),
    ),
)
case(
    "nn.scaled_dot_general",
    "a22 a22 real",
    lambda x, y: nn.scaled_dot_general(
        x, y, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float64
    ),
)

case("numpy.einsum", "a23 a32", lambda x, y: jnp.einsum("ij,jk->ik", x, y))
case("numpy.einsum", "a33", lambda x: jnp.einsum("ii->i", x))
case("numpy.roots", "p3 real", lambda p: jnp.roots(p, strip_zeros=False))
case("numpy.polyfit", "a5 a5 real", lambda x, y: jnp.polyfit(x, y, 2))

_L = lax.linalg

case("lax.linalg.ormqr", "a32 u2 a32", lambda a, t, c: _L.ormqr(a, t, c))
case("lax.linalg.qr", "e32", lambda x: _L.qr(x, full_matrices=False))
case("lax.linalg.svd", "e23", lambda x: _L.svd(x, compute_uv=False))
case("lax.linalg.svd", "e32 real", lambda x: _L.svd(x, full_matrices=False))
case(
    "lax.linalg.eig",
    "e33 real",
    lambda x: _L.eig(x, compute_left_eigenvectors=False, enable_eigvec_derivs=True),
)
case(
    "lax.linalg.triangular_solve",
    "e33 a32",
    lambda a, b: _L.triangular_solve(a, b, left_side=True, lower=True),
)
case(
    "lax.linalg.triangular_solve",
    "e22 a32",
    lambda a, b: _L.triangular_solve(a, b, transpose_a=True, unit_diagonal=True),
)

case("numpy.linalg.svd", "e23", lambda x: linalg.svd(x, compute_uv=False))
case("numpy.linalg.svd", "e32", lambda x: linalg.svd(x, full_matrices=False))
case("numpy.linalg.lstsq", "e32 a3", lambda a, b: linalg.lstsq(a, b)[0])
case("numpy.linalg.matrix_power", "e22", lambda x: linalg.matrix_power(x, 3))
case("numpy.linalg.matrix_power", "e22", lambda x: linalg.matrix_power(x, -2))
for _ord in (1, 3, np.inf):
    case("numpy.linalg.norm", "a4", lambda x, o=_ord: linalg.norm(x, o))
for _ord in (2, "nuc"):
    case("numpy.linalg.matrix_norm", "e23", lambda x, o=_ord: linalg.matrix_norm(x, ord=o))
case("numpy.linalg.multi_dot", "a23 a32 a22", lambda *x: linalg.multi_dot(x))

case("numpy.fft.fft", "a4", lambda x: fft.fft(x, 3, norm="ortho"))
case("lax.fft", "c4", lambda x: lax.fft(x, "FFT", (4,)))
case("lax.fft", "a4 real", lambda x: lax.fft(x, "RFFT", (4,)))
case("lax.fft", "a3 real", lambda x: lax.fft(x, "RFFT", (3,)))
case("lax.fft", "c3", lambda x: lax.fft(x, "IRFFT", (4,)))

# --- functions that take functions -------------------------------------------------------

case("lax.cond", "p a3 real", lambda p, x: lax.cond(p > 0, jnp.sin, jnp.exp, x))
case("lax.switch", "a3", lambda x: lax.switch(1, [jnp.sin, jnp.exp, jnp.cos], x))
case("lax.map", "a3", lambda x: lax.map(jnp.sin, x))
case("lax.scan", "a a3", lambda c, x: lax.scan(lambda c, x: (jnp.sin(c * x), c + x), c, x))
case("lax.fori_loop", "a2", lambda x: lax.fori_loop(0, 3, lambda i, x: jnp.sin(x) * x, x))
case(
    "lax.while_loop",
    "a2",
    lambda x: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x))[1],
)
case(
    "lax.custom_linear_solve",
    "e22 a2 real",
    lambda a, b: lax.custom_linear_solve(
        lambda x: a @ x, b, lambda _, b: linalg.inv(a) @ b, lambda _, b: linalg.inv(a).T @ b
    ),
)
case(
    "lax.custom_root",
    "p2 real",
    lambda a: lax.custom_root(
        lambda x: x**3 - a,
        jnp.ones(2),
        lambda f, _: lax.fori_loop(0, 60, lambda i, x: x - (x**3 - a) / (3 * x**2), jnp.ones(2)),
        lambda g, y: y / g(jnp.ones(2)),
    ),
)

# --- collectives over the examples of a batch or over devices ----------------------------

for _name, *_rest in (
    *(("psum",), ("pmean",), ("pmax",), ("pmin",), ("all_gather",), ("psum_scatter",)),
    *(("pshuffle", [1, 2, 0]), ("ppermute", [(0, 1), (1, 2), (2, 0)])),
    *(("all_to_all", 0, 0), ("pswapaxes", 0)),
):
    _draws = "a33" if _name in ("psum_scatter", "all_to_all", "pswapaxes") else "a3"
    _one = lambda x, name=_name, rest=_rest: x * getattr(lax, name)(x, "i", *rest)
    _real = " real" if _name in ("pmax", "pmin") else ""
    case(f"lax.{_name}", _draws + _real, jax.vmap(_one, axis_name="i"))

# --- names without a derivative ----------------------------------------------------------

_NOT_HERE = {
    "compositions of functions in the table": {
        "lax": "approx_min_k batch_matmul broadcast_like broadcast_to_rank collapse conv "
        "conv_with_general_padding dce_sink dynamic_index_in_dim dynamic_slice_in_dim "
        "dynamic_update_index_in_dim dynamic_update_slice_in_dim full full_like "
        "index_in_dim slice_in_dim stage",
        "numpy": "append apply_along_axis apply_over_axes argwhere astype bincount choose compress "
        "delete dsplit extract fill_diagonal frexp fromfunction frompyfunc full full_like "
        "geomspace histogram histogram2d histogramdd insert kaiser ldexp linspace "
        "logspace modf moveaxis nextafter partition permute_dims piecewise place put "
        "put_along_axis resize rollaxis spacing unstack unwrap vectorize vsplit",
        "numpy.linalg": "tensorinv tensorsolve",
    },
    "integers, booleans and strings": {
        "lax": "argmax argmin axis_index axis_size bitcast_convert_type bitwise_and bitwise_not "
        "bitwise_or bitwise_xor clz eq ge gt is_finite le lt mulhi ne population_count reduce_and "
        "reduce_or reduce_xor shift_left shift_right_arithmetic shift_right_logical",
        "numpy": "all allclose any argmax argmin argpartition argsort array_equal array_equiv "
        "array_repr array_str bitwise_and bitwise_count bitwise_invert bitwise_left_shift "
        "bitwise_not bitwise_or bitwise_right_shift bitwise_xor can_cast count_nonzero digitize "
        "equal flatnonzero gcd greater greater_equal invert isclose iscomplex iscomplexobj "
        "isdtype isfinite isin isinf isnan isneginf isposinf isreal isrealobj isscalar issubdtype "
        "iterable lcm left_shift less less_equal lexsort logical_and logical_not logical_or "
        "logical_xor nanargmax nanargmin ndim nonzero not_equal packbits promote_types "
        "ravel_multi_index result_type right_shift searchsorted shape signbit size unpackbits "
        "unravel_index histogram_bin_edges get_printoptions set_printoptions printoptions "
        "einsum_path",
        "lax.linalg": "lu_pivots_to_permutation",
        "numpy.linalg": "matrix_rank",
        "nn": "one_hot",
    },
    "functions that create or load arrays": {
        "lax": "broadcasted_iota empty iota rng_bit_generator rng_uniform",
        "numpy": "arange bartlett blackman diag_indices diag_indices_from empty empty_like eye "
        "from_dlpack frombuffer fromfile fromiter fromstring hamming hanning identity indices ix_ "
        "load mask_indices ones ones_like save savez tri tril_indices tril_indices_from "
        "triu_indices triu_indices_from zeros zeros_like",
        "numpy.fft": "fftfreq rfftfreq",
        "scipy.special": "bernoulli",
    },
    "the shape of the result depends on values": {
        "numpy": "intersect1d setdiff1d setxor1d union1d unique unique_all unique_counts "
        "unique_inverse unique_values trim_zeros",
    },
    "functions that compute shapes, and settings": {
        "lax": "ConvGeneralDilatedDimensionNumbers DotDimensionNumbers PrecisionLike after_all "
        "broadcast_shapes conv_dimension_numbers conv_general_permutations "
        "conv_general_shape_tuple conv_shape_tuple conv_transpose_shape_tuple create_token dtype "
        "padtype_to_pads reduce_window_shape_tuple shape_as_value with_sharding_constraint",
        "numpy": "broadcast_shapes",
        "nn": "get_scaled_dot_general_config",
    },
    "communication between devices": {
        "lax": "pbroadcast pcast precv psend pvary ragged_all_to_all",
    },
    "derivatives that JAX cannot differentiate": {
        "lax": "igamma_grad_a random_gamma_grad",
    },
    "microscaling formats of accelerators": {"nn": "scaled_matmul"},
}
WITHOUT: dict[str, str] = {
    f"{space}.{name}": reason
    for reason, spaces in _NOT_HERE.items()
    for space, names in spaces.items()
    for name in names.split()
}
"""Maps the name of each function that no case differentiates to the reason."""


def names() -> Iterator[str]:
    """Yield every public function of the namespaces with its namespace."""
    for space, module in NAMESPACES.items():
        for name in dir(module):
            result = getattr(module, name)
            if not name.startswith("_") and callable(result) and not isinstance(result, type):
                yield f"{space}.{name}"


@cache
def cases() -> tuple[Case, ...]:
    """Return the cases of all functions that this version of JAX has."""
    present = set(names())
    return tuple(case for name, result in _TABLE.items() if name in present for case in result)


def unknown() -> list[str]:
    """Return names that the table does not contain, which are new in this version of JAX."""
    return [name for name in names() if name not in _TABLE and name not in WITHOUT]


def takes_complex(case: Case) -> bool:
    """Return whether the function supports complex arguments."""
    if case.draws.endswith(" real") or case.complex_only:
        return False
    try:
        jax.eval_shape(case.f, *case.arguments("complex128"))
    except (TypeError, ValueError, NotImplementedError):
        return False
    return True
