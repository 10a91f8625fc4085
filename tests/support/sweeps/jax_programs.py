"""What the sweep over JAX differentiates: a table of arguments for each public function.

The functions are found by walking JAX's namespaces; this table says at which arguments each is
differentiated, and which names have no derivative. A name that stands in neither is new in its
version of JAX, and the sweep says so. Arguments keep away from kinks, poles, branch cuts and
ties by more than a step of the finite differences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
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
"""The version of JAX whose names the table knows."""

Draw = Callable[[np.random.Generator], np.ndarray]


@dataclass(frozen=True)
class Case:
    """One function with arguments, all of which are differentiated.

    Attributes:
        f: Takes the arguments; what it closes over is constant.
        draws: What draws each argument.
        both: Whether complex arguments make sense, should the function take them.
        program: The name of the function, with its namespace.
        sample: Which of the function's cases it is.
    """

    f: Callable[..., Any]
    draws: tuple[Draw, ...]
    both: bool = True
    program: str = ""
    sample: int = 0

    def arguments(self, dtype: str) -> list[np.ndarray]:
        """The arguments in float64 or complex128, the same in each run."""
        rng = np.random.default_rng(crc32(f"{self.program} {self.sample}".encode()))
        real = [draw(rng) for draw in self.draws]
        if dtype == "float64" or any(np.iscomplexobj(x) for x in real):
            return real
        return [x + 1j * _away(rng, x.shape, 0.2, 0.6) for x in real]

    @property
    def complex_only(self) -> bool:
        """Whether its arguments are complex by themselves."""
        rng = np.random.default_rng(0)
        return any(np.iscomplexobj(draw(rng)) for draw in self.draws)


def _away(rng: np.random.Generator, shape: tuple[int, ...], low: float, high: float) -> np.ndarray:
    """Distinct numbers of either sign, `low` to `high` away from zero."""
    n = int(np.prod(shape))
    sizes = low + (high - low) * (rng.permutation(n) + rng.uniform(0.3, 0.7, n)) / max(n, 1)
    return (rng.choice([-1.0, 1.0], n) * sizes).reshape(shape)


def any_(*shape: int) -> Draw:
    """Either sign, away from zero."""
    return lambda rng: _away(rng, shape, 0.25, 1.6)


def pos(*shape: int) -> Draw:
    """Positive."""
    return lambda rng: np.abs(_away(rng, shape, 0.3, 1.8))


def unit(*shape: int) -> Draw:
    """Between -1 and 1."""
    return lambda rng: _away(rng, shape, 0.15, 0.8)


def inside(*shape: int) -> Draw:
    """Between 0 and 1."""
    return lambda rng: np.abs(_away(rng, shape, 0.15, 0.8))


def above(*shape: int) -> Draw:
    """Above 1."""
    return lambda rng: 1.0 + np.abs(_away(rng, shape, 0.3, 1.5))


def large(*shape: int) -> Draw:
    """Above 2."""
    return lambda rng: 2.0 + np.abs(_away(rng, shape, 0.3, 1.5))


def between(*shape: int) -> Draw:
    """Away from integers and from halves."""

    def draw(rng: np.random.Generator) -> np.ndarray:
        return np.rint(_away(rng, shape, 1.0, 3.0)) + rng.uniform(0.15, 0.35, shape)

    return draw


def at(*values: float) -> Draw:
    """These numbers."""
    return lambda rng: np.array(values)


def spd(n: int) -> Draw:
    """Symmetric and positive definite."""

    def draw(rng: np.random.Generator) -> np.ndarray:
        a = rng.normal(size=(n, n))
        return a @ a.T + n * np.eye(n)

    return draw


def near_eye(*shape: int) -> Draw:
    """A well-conditioned matrix, or a stack of them, with simple eigenvalues."""

    def draw(rng: np.random.Generator) -> np.ndarray:
        n, m = shape[-2:]
        return 0.3 * rng.normal(size=shape) + np.diag(1.5 + np.arange(max(n, m)))[:n, :m]

    return draw


def cplx(*shape: int) -> Draw:
    """Complex, away from zero in both parts."""
    return lambda rng: _away(rng, shape, 0.25, 1.5) + 1j * _away(rng, shape, 0.2, 1.1)


_TABLE: dict[str, list[Case]] = {}


def _absent(*_: Any) -> Any:
    raise NotImplementedError("this version of JAX does not have it")


def put(space: str, names: str, *draws: Draw, both: bool = True) -> None:
    """Functions that are differentiated in all of their arguments."""
    for name in names.split():
        _put(f"{space}.{name}", Case(getattr(NAMESPACES[space], name, _absent), draws, both))


def case(program: str, f: Callable[..., Any], *draws: Draw, both: bool = True) -> None:
    """A function that needs other arguments besides, which f holds."""
    _put(program, Case(f, draws, both))


def _put(program: str, made: Case) -> None:
    cases = _TABLE.setdefault(program, [])
    cases.append(replace(made, program=program, sample=len(cases)))


# --- elementwise -------------------------------------------------------------------------

V, M = (3,), (2, 3)

put(
    "lax",
    "abs asinh atan cbrt conj cos cosh erf erfc exp exp2 expm1 logistic neg "
    "reciprocal sign sin sinh square tan tanh bessel_i0e bessel_i1e",
    any_(*V),
)
put("lax", "ceil floor round", between(*V))
put("lax", "log log1p rsqrt sqrt", pos(*V))
put("lax", "digamma lgamma", pos(*V), both=False)
put("lax", "acos asin atanh", unit(*V))
put("lax", "erf_inv", unit(*V), both=False)
put("lax", "acosh", above(*V))
put("lax", "add sub mul div", any_(*V), any_(*V))
put("lax", "max min atan2", any_(*V), any_(*V), both=False)
put("lax", "rem", at(2.3, -1.6, 3.1), at(0.9, 0.7, -1.2), both=False)
put("lax", "pow", pos(*V), any_(*V))
put("lax", "complex", any_(*V), any_(*V), both=False)
put("lax", "imag real", cplx(*V))
case("lax.integer_pow", lambda x: lax.integer_pow(x, 3), any_(*V))
case("lax.integer_pow", lambda x: lax.integer_pow(x, -2), any_(*V))
case("lax.pow", lambda x: lax.pow(x, 3), any_(*V))
case("lax.polygamma", lambda x: lax.polygamma(jnp.full(3, 1.0), x), pos(*V), both=False)
case("lax.zeta", lambda x: lax.zeta(jnp.full(3, 2.5), x), pos(*V), both=False)
case("lax.igamma", lambda x: lax.igamma(jnp.array([0.7, 1.3, 2.1]), x), pos(*V), both=False)
case("lax.igammac", lambda x: lax.igammac(jnp.array([0.7, 1.3, 2.1]), x), pos(*V), both=False)
put("lax", "igamma igammac", pos(*V), pos(*V), both=False)
case(
    "lax.betainc",
    lambda x: lax.betainc(jnp.array([0.7, 1.3, 2.1]), jnp.full(3, 1.5), x),
    inside(*V),
    both=False,
)
put("lax", "clamp", unit(*V), any_(*V), above(*V), both=False)
case("lax.reduce_precision", lambda x: lax.reduce_precision(x, 11, 52), any_(*V), both=False)
case("lax.nextafter", lambda x: lax.nextafter(x, x + 1), any_(*V), both=False)

put(
    "numpy",
    "abs absolute arcsinh arctan asinh atan cbrt conj conjugate cos cosh deg2rad "
    "degrees exp exp2 expm1 fabs i0 negative positive rad2deg radians real reciprocal "
    "sign sin sinc sinh square tan tanh nan_to_num",
    any_(*V),
)
put("numpy", "around ceil floor rint round trunc", between(*V))
put("numpy", "log log10 log1p log2 sqrt", pos(*V))
put("numpy", "acos arccos asin arcsin atanh arctanh", unit(*V))
put("numpy", "acosh arccosh", above(*V))
put("numpy", "angle imag", cplx(*V))
put("numpy", "add subtract multiply divide true_divide logaddexp logaddexp2", any_(*V), any_(*V))
put(
    "numpy",
    "arctan2 atan2 hypot maximum minimum fmax fmin copysign heaviside",
    any_(*V),
    any_(*V),
    both=False,
)
put(
    "numpy",
    "fmod mod remainder floor_divide divmod",
    at(2.3, -1.6, 3.1),
    at(0.9, 0.7, -1.2),
    both=False,
)
put("numpy", "pow power float_power", pos(*V), any_(*V))
case("numpy.power", lambda x: jnp.power(x, 3), any_(*V))
case("numpy.pow", lambda x: x**2, any_(*V))
case("numpy.ldexp", lambda x: jnp.ldexp(x, jnp.array([1, 2, -1])), any_(*V), both=False)
case("numpy.frexp", lambda x: jnp.frexp(x)[0], any_(*V), both=False)
case("numpy.modf", jnp.modf, any_(*V), both=False)
put("numpy", "clip", any_(*V), unit(*V), above(*V), both=False)
case("numpy.nextafter", lambda x: jnp.nextafter(x, x + 1), any_(*V), both=False)
case("numpy.spacing", lambda x: getattr(jnp, "spacing")(x), any_(*V), both=False)  # noqa: B009

put(
    "scipy.special",
    "digamma gamma gammaln loggamma entr factorial",
    pos(*V),
    both=False,
)
put("scipy.special", "erf erfc erfcx expit i0 i0e i1 i1e", any_(*V), both=False)
put("scipy.special", "log_ndtr ndtr dawsn", any_(*V), both=False)
put("scipy.special", "exp1 expi sici fresnel spence", pos(*V), both=False)
put("scipy.special", "logit ndtri", inside(*V), both=False)
put("scipy.special", "erfinv", unit(*V), both=False)
put("scipy.special", "wofz", cplx(*V))
put("scipy.special", "beta betaln kl_div rel_entr poch", pos(*V), pos(*V), both=False)
case(
    "scipy.special.betaln",
    lambda x: special.betaln(x, jnp.ones(3)),
    at(1.0, 1.0, 1.0),
    both=False,
)
put("scipy.special", "xlogy xlog1py boxcox boxcox1p", pos(*V), pos(*V), both=False)
put("scipy.special", "owens_t", any_(*V), any_(*V), both=False)
put("scipy.special", "comb", large(*V), unit(*V), both=False)
case(
    "scipy.special.betainc",
    lambda x: special.betainc(jnp.array([0.7, 1.3, 2.1]), 1.5, x),
    inside(*V),
    both=False,
)
put("scipy.special", "betainc", pos(*V), pos(*V), inside(*V), both=False)
case("scipy.special.expn", lambda x: special.expn(2, x), pos(*V), both=False)
put("scipy.special", "gammainc gammaincc", pos(*V), pos(*V), both=False)
case("scipy.special.gammainc", lambda x: special.gammainc(1.3, x), pos(*V), both=False)
case("scipy.special.gammaincc", lambda x: special.gammaincc(1.3, x), pos(*V), both=False)
case("scipy.special.gammasgn", special.gammasgn, any_(*V), both=False)
case("scipy.special.multigammaln", lambda x: special.multigammaln(x, 2), above(*V), both=False)
case("scipy.special.polygamma", lambda x: special.polygamma(1, x), pos(*V), both=False)
case("scipy.special.zeta", lambda x: special.zeta(2.5, x), pos(*V), both=False)
case("scipy.special.hyp1f1", lambda x: special.hyp1f1(1.3, 2.1, x), unit(*V), both=False)
put("scipy.special", "hyp1f1", pos(*V), pos(*V), unit(*V), both=False)
case("scipy.special.hyp2f1", lambda x: special.hyp2f1(0.7, 1.3, 2.1, x), unit(*V), both=False)
case("scipy.special.bessel_jn", lambda x: special.bessel_jn(x, v=2, n_iter=20), pos(*V), both=False)
case(
    "scipy.special.sph_harm_y",
    lambda a, b: special.sph_harm_y(jnp.array([2]), jnp.array([1]), a, b, n_max=2),
    pos(1),
    pos(1),
    both=False,
)
put("scipy.special", "log_softmax softmax logsumexp", any_(*M))
case("scipy.special.logsumexp", lambda x, b: special.logsumexp(x, b=b, axis=0), any_(*M), pos(*M))

put(
    "nn",
    "celu elu gelu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu log_sigmoid "
    "mish relu relu6 selu sigmoid silu soft_sign softplus sparse_plus sparse_sigmoid squareplus "
    "swish tanh",
    any_(*V),
)
case("nn.gelu", lambda x: nn.gelu(x, approximate=False), any_(*V))
case("nn.log1mexp", lambda x: getattr(nn, "log1mexp")(x), pos(*V), both=False)  # noqa: B009
put("nn", "log_softmax softmax logsumexp logmeanexp standardize", any_(*M))
case("nn.softmax", lambda x: nn.softmax(x, where=jnp.array([True, False, True])), any_(*M))
case("nn.glu", nn.glu, any_(2, 4))
case(
    "nn.dot_product_attention",
    lambda q, k, v: nn.dot_product_attention(q, k, v),
    any_(1, 2, 1, 2),
    any_(1, 3, 1, 2),
    any_(1, 3, 1, 2),
)
case(
    "nn.dot_product_attention",
    lambda q, k, v, b: nn.dot_product_attention(q, k, v, bias=b, is_causal=True),
    any_(1, 3, 1, 2),
    any_(1, 3, 1, 2),
    any_(1, 3, 1, 2),
    any_(1, 1, 3, 3),
)

# --- reductions and scans ----------------------------------------------------------------

case("lax.reduce", lambda x: lax.reduce(x, 0.0, lax.add, (0,)), any_(*M))
case("lax.reduce", lambda x: lax.reduce(x, 1.0, lax.mul, (1,)), any_(*M))
case("lax.reduce", lambda x: lax.reduce(x, -jnp.inf, lax.max, (1,)), any_(*M), both=False)
case(
    "lax.reduce", lambda x, i: lax.reduce(x, i, lambda a, b: a + b + a * b, (1,)), unit(*M), unit()
)
case("lax.reduce_sum", lambda x: lax.reduce_sum(x, (0,)), any_(*M))
case("lax.reduce_prod", lambda x: lax.reduce_prod(x, (1,)), any_(*M))
case("lax.reduce_max", lambda x: lax.reduce_max(x, (1,)), any_(*M), both=False)
case("lax.reduce_min", lambda x: lax.reduce_min(x, (1,)), any_(*M), both=False)
for _name in ("cumsum", "cumprod", "cumlogsumexp", "cummax", "cummin"):
    _scan = getattr(lax, _name)
    case(f"lax.{_name}", _scan, any_(4), both=_name in ("cumsum", "cumprod"))
    case(
        f"lax.{_name}",
        lambda x, f=_scan: f(x, axis=1, reverse=True),
        any_(*M),
        both=_name in ("cumsum", "cumprod"),
    )
case(
    "lax.reduce_window", lambda x: lax.reduce_window(x, 0.0, lax.add, (2,), (1,), "VALID"), any_(4)
)
case(
    "lax.reduce_window",
    lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME"),
    any_(3, 3),
    both=False,
)
case(
    "lax.reduce_window",
    lambda x: lax.reduce_window(x, jnp.inf, lax.min, (2,), (2,), "VALID"),
    any_(4),
    both=False,
)
case("lax.reduce_window", lambda x: lax.reduce_window(x, 1.0, lax.mul, (2,), (1,), "SAME"), any_(4))
case("lax.associative_scan", lambda x: lax.associative_scan(jnp.multiply, x), any_(4))
case("lax.top_k", lambda x: lax.top_k(x, 2)[0], any_(5), both=False)
case("lax.approx_max_k", lambda x: lax.approx_max_k(x, 2)[0], any_(5), both=False)
case("lax.approx_min_k", lambda x: lax.approx_min_k(x, 2)[0], any_(5), both=False)
case("lax.sort", lax.sort, any_(4))
case("lax.sort", lambda x: lax.sort(x, dimension=0), any_(3, 2))
case("lax.sort", lambda x, y: lax.sort((x, y), num_keys=1), any_(4), any_(4))
put("lax", "sort_key_val", any_(4), any_(4))

for _name in ("sum", "prod", "mean", "std", "var"):
    put("numpy", f"{_name} nan{_name}", any_(*M))
    case(f"numpy.{_name}", lambda x, n=_name: getattr(jnp, n)(x, axis=1), any_(*M))
put("numpy", "max amax min amin ptp median nanmax nanmin nanmedian", any_(5), both=False)
case("numpy.max", lambda x: jnp.max(x, axis=0), any_(*M), both=False)
put("numpy", "cumsum cumprod nancumsum nancumprod cumulative_sum cumulative_prod", any_(4))
for _name in ("percentile", "nanpercentile"):
    case(f"numpy.{_name}", lambda x, n=_name: getattr(jnp, n)(x, 37.0), any_(5), both=False)
for _name in ("quantile", "nanquantile"):
    case(f"numpy.{_name}", lambda x, n=_name: getattr(jnp, n)(x, 0.37), any_(5), both=False)
put("numpy", "average", any_(4))
case("numpy.average", lambda x, w: jnp.average(x, weights=w), any_(4), pos(4))
put("numpy", "trapezoid diff ediff1d gradient", any_(4))
case("numpy.trapezoid", lambda y, x: jnp.trapezoid(y, jnp.cumsum(x)), any_(4), pos(4))
put("numpy", "cov corrcoef", any_(2, 4))
put("numpy", "sort sort_complex", any_(4))
case("numpy.partition", lambda x: jnp.partition(x, 2), any_(5), both=False)
case("numpy.unwrap", lambda x: jnp.unwrap(4 * x), any_(4), both=False)

# --- shapes and indices ------------------------------------------------------------------

case("lax.broadcast", lambda x: lax.broadcast(x, (2,)), any_(*V))
case("lax.broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (2, 3), (1,)), any_(*V))
case("lax.broadcast_like", lambda x: getattr(lax, "broadcast_like")(x, jnp.ones((3,))), any_(*V))  # noqa: B009
case("lax.broadcast_to_rank", lambda x: lax.broadcast_to_rank(x, 2), any_(*V))
case("lax.collapse", lambda x: lax.collapse(x, 0), any_(*M))
case("lax.concatenate", lambda x, y: lax.concatenate([x, y], 0), any_(*V), any_(2))
case("lax.stack", lambda x, y: getattr(lax, "stack")([x, y]), any_(*V), any_(*V))  # noqa: B009
case("lax.unstack", lambda x: getattr(lax, "unstack")(x), any_(*M))  # noqa: B009
case("lax.expand_dims", lambda x: lax.expand_dims(x, (1,)), any_(*V))
case("lax.squeeze", lambda x: lax.squeeze(x, (0,)), any_(1, 3))
case("lax.reshape", lambda x: lax.reshape(x, (3, 2)), any_(*M))
case("lax.reshape", lambda x: lax.reshape(x, (6,), (1, 0)), any_(*M))
case("lax.rev", lambda x: lax.rev(x, (1,)), any_(*M))
case("lax.transpose", lambda x: lax.transpose(x, (1, 0)), any_(*M))
case("lax.tile", lambda x: getattr(lax, "tile")(x, (2,)), any_(*V))  # noqa: B009
case("lax.split", lambda x: lax.split(x, (1, 2)), any_(*V))
case("lax.pad", lambda x, v: lax.pad(x, v, [(1, 2, 1)]), any_(*V), any_())
case("lax.pad", lambda x, v: lax.pad(x, v, [(-1, 1, 0)]), any_(*V), any_())
case("lax.slice", lambda x: lax.slice(x, (1,), (5,), (2,)), any_(5))
case("lax.slice_in_dim", lambda x: lax.slice_in_dim(x, 1, 3), any_(4))
case("lax.index_in_dim", lambda x: lax.index_in_dim(x, 1), any_(*V))
case("lax.index_take", lambda x: lax.index_take(x, jnp.array([[0, 2]]), (0,)), any_(*V))
case("lax.dynamic_slice", lambda x: lax.dynamic_slice(x, (1,), (2,)), any_(4))
case("lax.dynamic_slice_in_dim", lambda x: lax.dynamic_slice_in_dim(x, 1, 2), any_(4))
case("lax.dynamic_index_in_dim", lambda x: lax.dynamic_index_in_dim(x, 1), any_(4))
case(
    "lax.dynamic_update_slice",
    lambda x, u: lax.dynamic_update_slice(x, u, (1,)),
    any_(4),
    any_(2),
)
case(
    "lax.dynamic_update_slice_in_dim",
    lambda x, u: lax.dynamic_update_slice_in_dim(x, u, 1, 0),
    any_(4),
    any_(2),
)
case(
    "lax.dynamic_update_index_in_dim",
    lambda x, u: lax.dynamic_update_index_in_dim(x, u, 1, 0),
    any_(4),
    any_(),
)
_TAKE = lax.GatherDimensionNumbers(offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,))
_PUT = lax.ScatterDimensionNumbers(
    update_window_dims=(), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
)
_AT, _TWICE = np.array([[2], [0]]), np.array([[2], [2]])
case("lax.gather", lambda x: lax.gather(x, _TWICE, _TAKE, (1,)), any_(4))
for _name in ("scatter", "scatter_add", "scatter_sub", "scatter_mul", "scatter_max", "scatter_min"):
    case(
        f"lax.{_name}",
        lambda x, u, n=_name: getattr(lax, n)(
            x, _AT, u, _PUT, **({"unique_indices": True} if n == "scatter_mul" else {})
        ),
        any_(4),
        any_(2),
        both=_name not in ("scatter_max", "scatter_min"),
    )
for _name in ("scatter", "scatter_add", "scatter_mul", "scatter_max", "scatter_min"):
    case(
        f"lax.{_name}",
        lambda x, u, n=_name: getattr(lax, n)(x, _TWICE, u, _PUT),
        any_(4),
        any_(2),
        both=_name not in ("scatter_max", "scatter_min"),
    )
case(
    "lax.scatter_apply",
    lambda x: lax.scatter_apply(x, jnp.asarray(_AT), jnp.sin, _PUT, update_shape=(2,)),
    any_(4),
)
case(
    "lax.select", lambda x, y: lax.select(jnp.array([True, False, True]), x, y), any_(*V), any_(*V)
)
case(
    "lax.select_n",
    lambda x, y, z: lax.select_n(jnp.array([0, 2, 1]), x, y, z),
    any_(*V),
    any_(*V),
    any_(*V),
)
case("lax.convert_element_type", lambda x: lax.convert_element_type(x, jnp.complex128), any_(*V))
case("lax.full_like", lambda x: lax.full_like(x, 2.0) * x, any_(*V))
case("lax.full", lambda x: lax.full((2,), x), any_())
case("lax.optimization_barrier", lax.optimization_barrier, any_(*V))
case("lax.stop_gradient", lambda x: x * lax.stop_gradient(2.0), any_(*V))
case("lax.dce_sink", lambda x: (lax.dce_sink(x), x)[1], any_(*V))
case("lax.composite", lambda x: lax.composite(jnp.sin, "sweep.sin")(x), any_(*V))
case("lax.platform_dependent", lambda x: lax.platform_dependent(x, default=jnp.sin), any_(*V))
case("lax.stage", lambda x: getattr(lax, "stage")(x), any_(*V))  # noqa: B009

put("numpy", "array asarray copy atleast_1d atleast_2d atleast_3d", any_(*V))
case("numpy.astype", lambda x: jnp.astype(x, jnp.complex128), any_(*V))
put("numpy", "ravel transpose flip fliplr flipud rot90 matrix_transpose", any_(*M))
case("numpy.permute_dims", lambda x: jnp.permute_dims(x, (1, 0)), any_(*M))
put("numpy", "squeeze", any_(1, 3))
put("numpy", "diag diagonal trace tril triu", any_(3, 3))
put("numpy", "diag diagflat vander", any_(3))
case("numpy.append", jnp.append, any_(*V), any_(2))
case("numpy.argwhere", lambda x: x[jnp.argwhere(x, size=2)[:, 0]], any_(*V))
for _name in [
    "block",
    "column_stack",
    "concat",
    "concatenate",
    "dstack",
    "hstack",
    "stack",
    "vstack",
    "broadcast_arrays",
    "meshgrid",
]:
    case(
        f"numpy.{_name}",
        lambda x, y, n=_name: (
            getattr(jnp, n)(x, y)
            if n in ("broadcast_arrays", "meshgrid")
            else getattr(jnp, n)([x, y])
        ),
        any_(*V),
        any_(*V),
    )
case("numpy.broadcast_to", lambda x: jnp.broadcast_to(x, (2, 3)), any_(*V))
case("numpy.expand_dims", lambda x: jnp.expand_dims(x, 0), any_(*V))
case("numpy.reshape", lambda x: jnp.reshape(x, (3, 2)), any_(*M))
case("numpy.resize", lambda x: jnp.resize(x, (2, 4)), any_(*V))
case("numpy.moveaxis", lambda x: jnp.moveaxis(x, 0, 1), any_(*M))
case("numpy.rollaxis", lambda x: jnp.rollaxis(x, 1), any_(*M))
case("numpy.swapaxes", lambda x: jnp.swapaxes(x, 0, 1), any_(*M))
case("numpy.roll", lambda x: jnp.roll(x, 1), any_(*V))
case("numpy.repeat", lambda x: jnp.repeat(x, 2), any_(*V))
case("numpy.tile", lambda x: jnp.tile(x, 2), any_(*V))
case("numpy.pad", lambda x: jnp.pad(x, 1), any_(*V))
for _mode in ("reflect", "wrap", "edge", "linear_ramp", "mean", "maximum", "symmetric"):
    case("numpy.pad", lambda x, m=_mode: jnp.pad(x, 1, mode=m), any_(*V), both=_mode != "maximum")
for _name in ("split", "array_split", "hsplit"):
    case(f"numpy.{_name}", lambda x, n=_name: getattr(jnp, n)(x, 2), any_(4))
case("numpy.vsplit", lambda x: jnp.vsplit(x, 2), any_(2, 2))
case("numpy.dsplit", lambda x: jnp.dsplit(x, 2), any_(1, 1, 2))
case("numpy.unstack", jnp.unstack, any_(*M))
case("numpy.delete", lambda x: jnp.delete(x, 1), any_(*V))
case("numpy.insert", lambda x, v: jnp.insert(x, 1, v), any_(*V), any_())
case("numpy.compress", lambda x: jnp.compress(np.array([True, False, True]), x, size=2), any_(*V))
case("numpy.extract", lambda x: jnp.extract(np.array([True, False, True]), x, size=2), any_(*V))
case(
    "numpy.choose",
    lambda x, y: jnp.choose(np.array([0, 1, 0]), [x, y], mode="clip"),
    any_(*V),
    any_(*V),
)
case(
    "numpy.select",
    lambda x, y: jnp.select([np.array([True, False, False])], [x], y),
    any_(*V),
    any_(*V),
)
case(
    "numpy.where",
    lambda x, y: jnp.where(np.array([True, False, True]), x, y),
    any_(*V),
    any_(*V),
)
case(
    "numpy.piecewise",
    lambda x: jnp.piecewise(x, [x < 0, x >= 0], [jnp.sin, jnp.exp]),
    any_(*V),
    both=False,
)
case("numpy.take", lambda x: jnp.take(x, np.array([2, 0, 2])), any_(*V))
case("numpy.take_along_axis", lambda x: jnp.take_along_axis(x, np.array([2, 0, 2]), 0), any_(*V))
case(
    "numpy.put",
    lambda x, v: jnp.put(x, np.array([2, 0]), v, inplace=False),
    any_(*V),
    any_(2),
)
case(
    "numpy.put_along_axis",
    lambda x, v: jnp.put_along_axis(x, np.array([2, 0]), v, 0, inplace=False),
    any_(*V),
    any_(2),
)
case(
    "numpy.place",
    lambda x, v: jnp.place(x, np.array([True, False, True]), v, inplace=False),
    any_(*V),
    any_(2),
)
case("numpy.fill_diagonal", lambda x, v: jnp.fill_diagonal(x, v, inplace=False), any_(3, 3), any_())
case("numpy.full", lambda x: jnp.full((2,), x), any_())
case("numpy.full_like", lambda x: jnp.full_like(jnp.ones(3), x), any_())
case("numpy.apply_along_axis", lambda x: jnp.apply_along_axis(jnp.sin, 0, x), any_(*M))
case("numpy.apply_over_axes", lambda x: jnp.apply_over_axes(jnp.sum, x, [0]), any_(*M))
case(
    "numpy.frompyfunc",
    lambda x, y: jnp.frompyfunc(jnp.hypot, 2, 1)(x, y),
    any_(*V),
    any_(*V),
    both=False,
)
case("numpy.vectorize", lambda x: jnp.vectorize(jnp.sin)(x), any_(*V))
case("numpy.linspace", lambda a, b: jnp.linspace(a, b, 4), any_(), any_())
case("numpy.logspace", lambda a, b: jnp.logspace(a, b, 4), unit(), unit())
case("numpy.geomspace", lambda a, b: jnp.geomspace(a, b, 4), pos(), above())
case("numpy.fromfunction", lambda x: jnp.fromfunction(lambda i: i * x, (3,), dtype=float), any_())
case("numpy.kaiser", lambda b: jnp.kaiser(4, b), pos(), both=False)
case(
    "numpy.interp",
    lambda x, f: jnp.interp(x, jnp.array([-2.0, -0.1, 0.1, 2.0]), f),
    any_(*V),
    any_(4),
    both=False,
)
case(
    "numpy.interp",
    lambda xp: jnp.interp(jnp.array([0.4, 1.5]), jnp.cumsum(xp) - 0.2, jnp.array([1.0, 3, -2, 5])),
    pos(4),
    both=False,
)
case(
    "numpy.bincount",
    lambda w: jnp.bincount(np.array([0, 2, 0]), weights=w, length=3),
    any_(*V),
)
case(
    "numpy.histogram", lambda w: jnp.histogram(np.array([0.1, 0.6, 0.7]), 2, weights=w)[0], any_(*V)
)
case(
    "numpy.histogram2d",
    lambda w: jnp.histogram2d(np.array([0.1, 0.6, 0.7]), np.array([0.1, 0.9, 0.2]), 2, weights=w)[
        0
    ],
    any_(*V),
)
case(
    "numpy.histogramdd",
    lambda w: jnp.histogramdd(np.array([[0.1], [0.6], [0.7]]), 2, weights=w)[0],
    any_(*V),
)

# --- products ----------------------------------------------------------------------------

case("lax.dot", lax.dot, any_(2, 3), any_(3, 2))
case("lax.dot", lax.dot, any_(3), any_(3))
case("lax.batch_matmul", lax.batch_matmul, any_(2, 1, 2), any_(2, 2, 1))
case(
    "lax.dot_general",
    lambda x, y: lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,)))),
    any_(2, 1, 2),
    any_(2, 2, 1),
)
case(
    "lax.scaled_dot",
    lambda x, y: getattr(lax, "scaled_dot")(x, y),  # noqa: B009
    any_(1, 2, 2),
    any_(1, 2, 2),
    both=False,
)
case("lax.conv", lambda x, k: lax.conv(x, k, (1,), "SAME"), any_(1, 1, 4), any_(1, 1, 2))
case(
    "lax.conv_general_dilated",
    lambda x, k: lax.conv_general_dilated(x, k, (2,), [(1, 0)], (1,), (2,)),
    any_(1, 2, 5),
    any_(2, 2, 2),
)
case(
    "lax.conv_general_dilated",
    lambda x, k: lax.conv_general_dilated(x, k, (1,), [(1, 0)], (2,), feature_group_count=2),
    any_(1, 2, 3),
    any_(2, 1, 2),
)
case(
    "lax.conv_general_dilated_local",
    lambda x, k: lax.conv_general_dilated_local(x, k, (1,), "VALID", (2,)),
    any_(1, 1, 3),
    any_(1, 2, 2),
)
case(
    "lax.conv_general_dilated_patches",
    lambda x: lax.conv_general_dilated_patches(x, (2,), (1,), "VALID"),
    any_(1, 1, 3),
)
case(
    "lax.conv_transpose",
    lambda x, k: lax.conv_transpose(x, k, (2,), "VALID", dimension_numbers=("NCH", "OIH", "NCH")),
    any_(1, 1, 3),
    any_(1, 1, 2),
)
case(
    "lax.conv_with_general_padding",
    lambda x, k: lax.conv_with_general_padding(x, k, (1,), [(1, 1)], None, None),
    any_(1, 1, 3),
    any_(1, 1, 2),
)
case(
    "lax.ragged_dot",
    lambda x, y: lax.ragged_dot(x, y, jnp.array([2, 1])),
    any_(3, 2),
    any_(2, 2, 2),
)
case(
    "lax.ragged_dot_general",
    lambda x, y: lax.ragged_dot_general(
        x,
        y,
        jnp.array([2, 1]),
        lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), [0], [0]),
    ),
    any_(3, 2),
    any_(2, 2, 2),
)
case(
    "nn.scaled_dot_general",
    lambda x, y: nn.scaled_dot_general(
        x, y, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float64
    ),
    any_(2, 2),
    any_(2, 2),
    both=False,
)

put("numpy", "dot inner vdot vecdot convolve correlate outer kron", any_(3), any_(3))
put("numpy", "cross", any_(3), any_(3))
put("numpy", "matmul tensordot", any_(2, 2, 2), any_(2, 2, 2))
put("numpy", "dot matmul", any_(2, 3), any_(3, 2))
put("numpy", "matvec", any_(2, 3), any_(3))
put("numpy", "vecmat", any_(2), any_(2, 3))
case("numpy.einsum", lambda x, y: jnp.einsum("ij,jk->ik", x, y), any_(2, 3), any_(3, 2))
case("numpy.einsum", lambda x: jnp.einsum("ii->i", x), any_(3, 3))
put("numpy", "poly polyder polyint", any_(3))
put("numpy", "polyadd polysub polymul polyval", any_(3), any_(3))
put("numpy", "polydiv", any_(4), any_(2))
case("numpy.roots", lambda p: jnp.roots(p, strip_zeros=False), pos(3), both=False)
case("numpy.polyfit", lambda x, y: jnp.polyfit(x, y, 2), any_(5), any_(5), both=False)

_L = lax.linalg

put("lax.linalg", "cholesky eigh", spd(3))
put("lax.linalg", "lu hessenberg schur", near_eye(3, 3))
put("lax.linalg", "tridiagonal", spd(3))
put("lax.linalg", "qdwh", near_eye(3, 2), both=False)
put("lax.linalg", "symmetric_product", any_(3, 2), spd(3), both=False)
put("lax.linalg", "householder_product", any_(3, 2), unit(2))
put("lax.linalg", "cholesky_update", spd(3), any_(3), both=False)
case("lax.linalg.ormqr", lambda a, t, c: _L.ormqr(a, t, c), any_(3, 2), unit(2), any_(3, 2))
case("lax.linalg.qr", lambda x: _L.qr(x, full_matrices=False), near_eye(3, 2))
case("lax.linalg.svd", lambda x: _L.svd(x, compute_uv=False), near_eye(2, 3))
case("lax.linalg.svd", lambda x: _L.svd(x, full_matrices=False), near_eye(3, 2), both=False)
case(
    "lax.linalg.eig",
    lambda x: _L.eig(x, compute_left_eigenvectors=False, enable_eigvec_derivs=True),
    near_eye(3, 3),
    both=False,
)
case(
    "lax.linalg.triangular_solve",
    lambda a, b: _L.triangular_solve(a, b, left_side=True, lower=True),
    near_eye(3, 3),
    any_(3, 2),
)
case(
    "lax.linalg.triangular_solve",
    lambda a, b: _L.triangular_solve(a, b, transpose_a=True, unit_diagonal=True),
    near_eye(2, 2),
    any_(3, 2),
)
put("lax.linalg", "tridiagonal_solve", unit(3), above(3), unit(3), any_(3, 1), both=False)

put("numpy.linalg", "cholesky", spd(3))
put("numpy.linalg", "det inv slogdet", near_eye(3, 3))
put("numpy.linalg", "det inv", near_eye(2, 2, 2))
put("numpy.linalg", "eigh eigvalsh", spd(3))
put("numpy.linalg", "eig eigvals", near_eye(3, 3))
put("numpy.linalg", "qr pinv cond", near_eye(3, 2))
put("numpy.linalg", "qr", near_eye(3, 3))
put("numpy.linalg", "svdvals", near_eye(3, 2))
case("numpy.linalg.svd", lambda x: linalg.svd(x, compute_uv=False), near_eye(2, 3))
case("numpy.linalg.svd", lambda x: linalg.svd(x, full_matrices=False), near_eye(3, 2))
put("numpy.linalg", "solve", near_eye(3, 3), any_(3))
case("numpy.linalg.lstsq", lambda a, b: linalg.lstsq(a, b)[0], near_eye(3, 2), any_(3))
case("numpy.linalg.matrix_power", lambda x: linalg.matrix_power(x, 3), near_eye(2, 2))
case("numpy.linalg.matrix_power", lambda x: linalg.matrix_power(x, -2), near_eye(2, 2))
put("numpy.linalg", "norm vector_norm", any_(4))
put("numpy.linalg", "norm matrix_norm", near_eye(2, 3))
for _ord in (1, 3, np.inf):
    case("numpy.linalg.norm", lambda x, o=_ord: linalg.norm(x, o), any_(4))
for _ord in (2, "nuc"):
    case("numpy.linalg.matrix_norm", lambda x, o=_ord: linalg.matrix_norm(x, ord=o), near_eye(2, 3))
case("numpy.linalg.multi_dot", lambda *x: linalg.multi_dot(x), any_(2, 3), any_(3, 2), any_(2, 2))
put("numpy.linalg", "cross outer vecdot", any_(3), any_(3))
put("numpy.linalg", "matmul", any_(2, 3), any_(3, 2))
put("numpy.linalg", "tensordot", any_(2, 2, 2), any_(2, 2, 2))
put("numpy.linalg", "diagonal trace matrix_transpose", any_(3, 3))
case("numpy.linalg.tensorinv", lambda x: linalg.tensorinv(x.reshape(2, 2, 4)), near_eye(4, 4))
case(
    "numpy.linalg.tensorsolve",
    lambda a, b: linalg.tensorsolve(a.reshape(4, 2, 2), b),
    near_eye(4, 4),
    any_(4),
)

put("numpy.fft", "fft ifft rfft ihfft", any_(4))
put("numpy.fft", "fft2 fftn ifft2 ifftn rfft2 rfftn", any_(2, 4))
put("numpy.fft", "irfft hfft", cplx(3))
put("numpy.fft", "irfft2 irfftn", cplx(2, 3))
put("numpy.fft", "fftshift ifftshift", any_(4))
case("numpy.fft.fft", lambda x: fft.fft(x, 3, norm="ortho"), any_(4))
case("lax.fft", lambda x: lax.fft(x, "FFT", (4,)), cplx(4))
case("lax.fft", lambda x: lax.fft(x, "RFFT", (4,)), any_(4), both=False)
case("lax.fft", lambda x: lax.fft(x, "RFFT", (3,)), any_(3), both=False)
case("lax.fft", lambda x: lax.fft(x, "IRFFT", (4,)), cplx(3))

# --- functions of functions --------------------------------------------------------------

case("lax.cond", lambda p, x: lax.cond(p > 0, jnp.sin, jnp.exp, x), pos(), any_(*V), both=False)
case("lax.switch", lambda x: lax.switch(1, [jnp.sin, jnp.exp, jnp.cos], x), any_(*V))
case("lax.map", lambda x: lax.map(jnp.sin, x), any_(*V))
case(
    "lax.scan",
    lambda c, x: lax.scan(lambda c, x: (jnp.sin(c * x), c + x), c, x),
    any_(),
    any_(*V),
)
case("lax.fori_loop", lambda x: lax.fori_loop(0, 3, lambda i, x: jnp.sin(x) * x, x), any_(2))
case(
    "lax.while_loop",
    lambda x: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.sin(s[1])), (0, x))[1],
    any_(2),
)
case(
    "lax.custom_linear_solve",
    lambda a, b: lax.custom_linear_solve(
        lambda x: a @ x, b, lambda _, b: linalg.inv(a) @ b, lambda _, b: linalg.inv(a).T @ b
    ),
    near_eye(2, 2),
    any_(2),
    both=False,
)
case(
    "lax.custom_root",
    lambda a: lax.custom_root(
        lambda x: x**3 - a,
        jnp.ones(2),
        lambda f, _: lax.fori_loop(0, 60, lambda i, x: x - (x**3 - a) / (3 * x**2), jnp.ones(2)),
        lambda g, y: y / g(jnp.ones(2)),
    ),
    pos(2),
    both=False,
)

# --- between the examples of a batch, as between devices ---------------------------------

for _name, _rest in {
    "psum": (),
    "pmean": (),
    "pmax": (),
    "pmin": (),
    "all_gather": (),
    "pshuffle": ([1, 2, 0],),
    "ppermute": ([(0, 1), (1, 2), (2, 0)],),
    "psum_scatter": (),
    "all_to_all": (0, 0),
    "pswapaxes": (0,),
}.items():
    case(
        f"lax.{_name}",
        lambda x, n=_name, rest=_rest: jax.vmap(
            lambda x: x * getattr(lax, n)(x, "i", *rest), axis_name="i"
        )(x),
        any_(3, 3) if _name in ("psum_scatter", "all_to_all", "pswapaxes") else any_(3),
        both=_name not in ("pmax", "pmin"),
    )

# --- names without a derivative ----------------------------------------------------------

_NOT_HERE = {
    "integers, booleans and texts": {
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
    "arrays are made, or read from elsewhere": {
        "lax": "broadcasted_iota empty iota rng_bit_generator rng_uniform",
        "numpy": "arange bartlett blackman diag_indices diag_indices_from empty empty_like eye "
        "from_dlpack frombuffer fromfile fromiter fromstring hamming hanning identity indices ix_ "
        "load mask_indices ones ones_like save savez tri tril_indices tril_indices_from "
        "triu_indices triu_indices_from zeros zeros_like",
        "numpy.fft": "fftfreq rfftfreq",
        "scipy.special": "bernoulli",
    },
    "the shape of the result hangs on the numbers": {
        "numpy": "intersect1d setdiff1d setxor1d union1d unique unique_all unique_counts "
        "unique_inverse unique_values trim_zeros",
    },
    "shapes and settings": {
        "lax": "ConvGeneralDilatedDimensionNumbers DotDimensionNumbers PrecisionLike after_all "
        "broadcast_shapes conv_dimension_numbers conv_general_permutations "
        "conv_general_shape_tuple conv_shape_tuple conv_transpose_shape_tuple create_token dtype "
        "padtype_to_pads reduce_window_shape_tuple shape_as_value with_sharding_constraint",
        "numpy": "broadcast_shapes",
        "nn": "get_scaled_dot_general_config",
    },
    "between devices": {
        "lax": "pbroadcast pcast precv psend pvary ragged_all_to_all",
    },
    "a derivative of another function, which has none itself": {
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
"""Names that no case differentiates, and why."""


def names() -> Iterator[str]:
    """Every public function of the namespaces, with its namespace."""
    for space, module in NAMESPACES.items():
        for name in dir(module):
            result = getattr(module, name)
            if not name.startswith("_") and callable(result) and not isinstance(result, type):
                yield f"{space}.{name}"


@cache
def cases() -> tuple[Case, ...]:
    """The cases of all functions that this version of JAX has."""
    present = set(names())
    return tuple(case for name, result in _TABLE.items() if name in present for case in result)


def unknown() -> list[str]:
    """Names that the table does not have: new in this version of JAX."""
    return [name for name in names() if name not in _TABLE and name not in WITHOUT]


def takes_complex(case: Case) -> bool:
    """Whether the function takes complex arguments."""
    if not case.both or case.complex_only:
        return False
    try:
        jax.eval_shape(case.f, *case.arguments("complex128"))
    except (TypeError, ValueError, NotImplementedError):
        return False
    return True
