"""The operations of a graph describe the computation: name, operands and attributes.

Each row of the table is an operation with a program for each framework. A NumPy
interpreter evaluates the graph from the operation names and attributes, and the result must equal
the result of the framework. The comparison detects swapped operands, and missing or wrong numbers,
axes and exponents.
"""

import importlib
import math
import re

import numpy as np
import pytest

from gradtools.seeing.formulas.expressions import evaluate, kind_of, placeholder
from gradtools.seeing.formulas.words import made
from gradtools.seeing.graphs.attributes import is_number

# The operation, a PyTorch program and a JAX program (empty if the framework lacks the operation). x
# and y are 3×4 with distinct positive entries, w is 4×4, v has 4 entries, and z is complex.
TABLE = """
add              ; x + y                               ; x + y
subtract         ; 1 - x                               ; 1 - x
subtract         ; x - y                               ; x - y
multiply         ; x * 0.1                             ; x * 0.1
multiply         ; 2 / x                               ;
divide           ;                                     ; 2 / x
divide           ; x / y                               ; x / y
power            ; 2**x                                ; 2**x
power            ; x**3                                ; x**3
power            ; x**y                                ; x**y
maximum          ; torch.maximum(x, y)                 ; jnp.maximum(x, y)
minimum          ; torch.minimum(x, y)                 ; jnp.minimum(x, y)
maximum          ; torch.clamp(x, min=y)               ; lax.max(x, y)
minimum          ; torch.clamp(x, max=y)               ; lax.min(x, y)
clip             ; torch.clamp(x, 0.6, 0.9)            ; lax.clamp(0.6, x, 0.9)
arctan2          ; torch.atan2(x, y)                   ; jnp.arctan2(x, y)
logaddexp        ; torch.logaddexp(x, y)               ; jnp.logaddexp(x, y)
complex          ; torch.complex(x, y)                 ; lax.complex(x, y)
compare          ; (x < y) * x                         ; (x < y) * x
compare          ; (x >= 0.7) * x                      ; (x >= 0.7) * x
where            ; torch.where(x > y, x, 2 * y)        ; jnp.where(x > y, x, 2 * y)
where            ; x.masked_fill(x > y, 2.0)           ; jnp.where(x > y, 2.0, x)
bitwise_and      ; ((x > y) & (y > 0.7)) * x           ; ((x > y) & (y > 0.7)) * x
bitwise_or       ; ((x > y) | (y > 0.7)) * x           ; ((x > y) | (y > 0.7)) * x
bitwise_not      ; ~(x > y) * x                        ; ~(x > y) * x
negate           ; -x                                  ; -x
exp              ; x.exp()                             ; jnp.exp(x)
exp2             ; x.exp2()                            ; jnp.exp2(x)
expm1            ; x.expm1()                           ; jnp.expm1(x)
log              ; x.log()                             ; jnp.log(x)
log2             ; x.log2()                            ;
log10            ; x.log10()                           ;
log1p            ; x.log1p()                           ; jnp.log1p(x)
sqrt             ; x.sqrt()                            ; jnp.sqrt(x)
rsqrt            ; x.rsqrt()                           ; lax.rsqrt(x)
reciprocal       ; x.reciprocal()                      ;
square           ;                                     ; jnp.square(x)
sin              ; x.sin()                             ; jnp.sin(x)
cos              ; x.cos()                             ; jnp.cos(x)
tan              ; x.tan()                             ; jnp.tan(x)
sinh             ; x.sinh()                            ; jnp.sinh(x)
cosh             ; x.cosh()                            ; jnp.cosh(x)
tanh             ; x.tanh()                            ; jnp.tanh(x)
arcsin           ; (x / 3).asin()                      ; jnp.arcsin(x / 3)
arccos           ; (x / 3).acos()                      ; jnp.arccos(x / 3)
arctan           ; x.atan()                            ; jnp.arctan(x)
arcsinh          ; x.asinh()                           ; jnp.arcsinh(x)
arccosh          ; (x + 1).acosh()                     ; jnp.arccosh(x + 1)
arctanh          ; (x / 3).atanh()                     ; jnp.arctanh(x / 3)
sigmoid          ; x.sigmoid()                         ; nn.sigmoid(x)
relu             ; torch.relu(x - 1)                   ;
silu             ; F.silu(x - 1)                       ;
erf              ; x.erf()                             ; special.erf(x)
erfc             ; x.erfc()                            ; special.erfc(x)
abs              ; (x - 1).abs()                       ; jnp.abs(x - 1)
sign             ; (x - 1).sign() * x                  ; jnp.sign(x - 1) * x
floor            ; x.floor() * x                       ; jnp.floor(x) * x
ceil             ; x.ceil() * x                        ; jnp.ceil(x) * x
round            ; x.round() * x                       ;
trunc            ; (3 * x).trunc() * x                 ;
real             ;                                     ; (z * z).real
imag             ;                                     ; (z * z).imag
cast             ; x.int() * y                         ; x.astype("int32") * y
sum              ; w.sum(0)                            ; w.sum(0)
sum              ; w.sum(1, keepdim=True)              ; w.sum(1, keepdims=True)
mean             ; w.mean(1)                           ;
prod             ; w.prod(1)                           ; w.prod(1)
max              ; w.amax(0)                           ; w.max(0)
min              ; w.amin(1)                           ; w.min(1)
logsumexp        ; w.logsumexp(1)                      ;
variance         ; w.var(0)                            ;
variance         ; w.var(1, correction=0)              ;
deviation        ; w.std(1)                            ;
norm             ; torch.linalg.vector_norm(w, 3, 1)   ;
softmax          ; w.softmax(0)                        ;
log_softmax      ; w.log_softmax(1)                    ;
matmul           ; x @ w                               ; x @ w
matmul           ; w @ v                               ; w @ v
matmul           ; torch.dot(v, y[0])                  ; v @ y[0]
einsum           ;                                     ; jnp.einsum("ij,kj->ki", x, w)
transpose        ; x.T                                 ; x.T
transpose        ; w.reshape(2, 2, 4).permute(2, 0, 1) ; w.reshape(2, 2, 4).transpose(2, 0, 1)
reshape          ; x.reshape(2, 6)                     ; x.reshape(2, 6)
reshape          ; x[:, None]                          ; lax.reshape(x, (12,), (1, 0)).reshape(3, 4)
broadcast        ; v.expand(3, 4) * x                  ; jnp.broadcast_to(v, (3, 4)) * x
concatenate      ; torch.cat([x, y], 1)                ; jnp.concatenate([x, y], 1)
stack            ; torch.stack([x, y], 1)              ; jnp.stack([x, y], 1)
slice            ; x[1:, ::2]                          ; x[1:, ::2]
slice            ; x[:, 2]                             ; x[:, 2:3]
flip             ; x.flip(1)                           ; jnp.flip(x, 1)
split            ; x.split(3, 1)[1] * 2                ; lax.split(x, (1, 3), 1)[1] * 2
unbind           ; x.unbind(1)[1] * 2                  ; jnp.unstack(x, axis=1)[1] * 2
add              ; torch.add(x, y, alpha=0.3)          ;
round            ;                                     ; jnp.round(3 * x) * x
maximum          ; torch.clamp_min(x, 0.8)             ;
addcmul          ; torch.addcmul(x, x, y, value=0.3)   ;
addcdiv          ; torch.addcdiv(x, x, y, value=0.3)   ;
lerp             ; torch.lerp(x, y, 0.3)               ;
hypot            ; torch.hypot(x, y)                   ;
xlogy            ; torch.xlogy(x, y)                   ;
vdot             ; torch.vdot(z, 2j * z)               ;
"""
ROWS = [[part.strip() for part in line.split(";")] for line in TABLE.strip().splitlines()]
CASES = {
    backend: [(operation, said) for operation, *both in ROWS if (said := both[k])]
    for k, backend in enumerate(("torch", "jax"))
}
WORDS = {
    "torch": {"torch": "torch", "F": "torch.nn.functional"},
    "jax": {"jnp": "jax.numpy", "lax": "jax.lax", "nn": "jax.nn", "special": "jax.scipy.special"},
}
RNG = np.random.default_rng(3)
ARGUMENTS = {
    name: RNG.uniform(0.5, 1.4, shape)
    for name, shape in {"x": (3, 4), "y": (3, 4), "w": (4, 4)}.items()
} | {"v": RNG.uniform(0.5, 1.4, 4), "z": RNG.normal(size=3) + 1j * RNG.normal(size=3)}
# NumPy implementations of the operations that a formula shows by name.
BY_NAME = {
    **{name: getattr(np, name) for name in "exp2 log2 log10 tan floor ceil trunc".split()},
    **{name: getattr(np, name) for name in "arcsin arccos arctan arcsinh arccosh".split()},
    **{name: getattr(np, name) for name in "arctanh arctan2 hypot power logaddexp".split()},
    **{name: getattr(np, name) for name in "maximum minimum".split()},
    **{name: getattr(np, name) for name in "bitwise_and bitwise_or bitwise_not".split()},
    "erf": np.vectorize(math.erf),
    "erfc": np.vectorize(math.erfc),
    "cast": lambda x, dtype: x.astype(dtype),
    "concatenate": lambda *xs, axis: np.concatenate(xs, axis),
    "stack": lambda *xs, axis: np.stack(xs, axis),
    "round": lambda x, rounding_method=None: np.round(x),
    "clip": lambda x, *bounds, min=None, max=None: np.clip(x, *(bounds or (min, max))),
    "prod": lambda x, axes=None: x.prod(axes),
    "norm": lambda x, ord, axes: np.linalg.norm(x, ord, *axes),
    "flip": lambda x, axes: np.flip(x, axes),
    "unbind": lambda x, axis: [*np.moveaxis(x, axis, 0)],
    "addcmul": lambda x, a, b, value=1: x + value * a * b,
    "addcdiv": lambda x, a, b, value=1: x + value * a / b,
    "lerp": lambda a, b, t: a + t * (b - a),
    "xlogy": lambda a, b: a * np.log(b),
}
DTYPES = {"f": "float64", "c": "complex128", "i": "int64", "u": "int64", "b": "bool"}


def computed(graph, given):
    """Evaluate a graph in NumPy from the names and attributes of its operations."""
    values = dict(zip(graph.inputs, given, strict=True))
    for v in graph.captured:
        name = graph.values[v].name
        if not name.startswith("["):
            assert is_number(name), f"{name or 'a captured value'} is not a number"
        values[v] = np.asarray(eval(name, {"inf": np.inf, "nan": np.nan}))
    for node in graph.nodes:
        values.update(zip(node.outputs, one(node, [values[v] for v in node.inputs]), strict=False))
    return [values[v] for v in graph.outputs]


def one(node, given):
    """Evaluate one operation of a graph in NumPy."""
    if node.bodies:
        (body,) = node.bodies
        return computed(body.graph, [given[i] for i in body.inputs])
    told, given = dict(node.attributes), [*given]
    if node.operation == "constant" and isinstance(told.get("value"), str):
        return [np.asarray(eval(told["value"]))]
    if "permutation" in told and node.operation == "reshape":
        given[0] = given[0].transpose(told.pop("permutation"))
    named = [placeholder("", x.shape, kind_of(DTYPES[x.dtype.kind])) for x in given]
    result = made(node.operation, named, told)
    if result is None:
        assert node.operation in BY_NAME, f"no NumPy code for {node.operation} with {told}"
        plain = BY_NAME[node.operation](*given, **told)
        return plain if isinstance(plain, list) else [plain]
    results = list(result) if isinstance(result, list | tuple) else [result]
    return evaluate(results, dict(zip(named, given, strict=True)))


def untrue(gt, words, operation, said):
    """Return a description of the error in the graph of a program, or an empty string."""
    names = [name for name in ARGUMENTS if re.search(rf"\b{name}\b", said)]
    f = eval(f"lambda {', '.join(names)}: {said}", words)
    given = [gt.asarray(ARGUMENTS[name]) for name in names]
    graph = gt.gradient_graph(f, *given, order=0)
    if operation not in {node.operation for _, node in graph.walk()}:
        return f"{said} contains no {operation}\n{graph}"
    (found,), expected = computed(graph, [ARGUMENTS[n] for n in names]), gt.to_numpy(f(*given))
    same = found.shape == expected.shape and np.allclose(found, expected, rtol=1e-6, atol=0)
    return "" if same else f"{said}\n{graph}\ngot {found}, expected\n{expected}"


@pytest.mark.sweep_at("jax")
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_graph_means_what_the_framework_computes(framework):
    pytest.importorskip(framework)
    gt = importlib.import_module(f"gradtools.{framework}")
    words = {name: importlib.import_module(at) for name, at in WORDS[framework].items()}
    found = [untrue(gt, words, *case) for case in CASES[framework]]
    assert not any(found), "\n\n".join(filter(None, found))
