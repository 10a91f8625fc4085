"""Programs of which the formula is read: what people differentiate by hand, as graphs."""

from tests.support.formula_builder import Builder


def linear():
    b = Builder()
    w, x, c = b.input("W", (3, 4)), b.input("x", (4,)), b.input("b", (3,))
    return b.graph(b("add", b("matmul", w, x), c))


def layer():
    b = Builder()
    w, x, c = b.input("W", (3, 4)), b.input("X", (5, 4)), b.input("b", (3,))
    y = b("add", b("matmul", x, b("transpose", w, permutation=(1, 0))), c)
    return b.graph(b("sum", b("tanh", y)))


def perceptron():
    b = Builder()
    x, w, c, v = b.input("X", (5, 4)), b.input("W", (4, 3)), b.input("b", (3,)), b.input("v", (3,))
    h = b("silu", b("add", b("matmul", x, w), c))
    return b.graph(b("mean", b("square", b("matmul", h, v))))


def linear_over_time():
    b = Builder()
    x, w, c = b.input("X", (2, 5, 4)), b.input("W", (3, 4)), b.input("b", (3,))
    y = b("add", c, b("matmul", x, b("transpose", w, permutation=(1, 0))))
    return b.graph(b("relu", y))


def cross_entropy():
    b = Builder()
    z, y = b.input("Z", (5, 3)), b.input("y", (5,), "int64")
    losses = b("multiply", b("one_hot", y, size=3), b("log_softmax", z, axis=1))
    return b.graph(b("negate", b("mean", b("sum", losses, axes=(1,)))))


def cross_entropy_of_probabilities():
    b = Builder()
    z, t = b.input("z", (3,)), b.input("t", (3,))
    return b.graph(b("negate", b("sum", b("multiply", t, b("log_softmax", z, axis=0)))))


def squared_error():
    b = Builder()
    w, x, y = b.input("W", (3, 4)), b.input("X", (5, 4)), b.input("Y", (5, 3))
    r = b("subtract", b("matmul", x, b("transpose", w, permutation=(1, 0))), y)
    return b.graph(b("mean", b("square", r)))


def complex_affine():
    b = Builder()
    w, i, c = (b.input(n, s, "complex128") for n, s in (("W", (3, 4)), ("I", (4,)), ("b", (3,))))
    return b.graph(b("add", b("matmul", w, i), c))


def affine_in_parts():
    b = Builder()
    w1, w2 = b.input("W_re", (3, 4)), b.input("W_im", (3, 4))
    i1, i2 = b.input("I_re", (4,)), b.input("I_im", (4,))
    c1, c2 = b.input("b_re", (3,)), b.input("b_im", (3,))
    re = b("add", b("subtract", b("matmul", w1, i1), b("matmul", w2, i2)), c1)
    im = b("add", b("add", b("matmul", w1, i2), b("matmul", w2, i1)), c2)
    return b.graph(re, im)


def modulus():
    b = Builder()
    z = b.input("z", (4,), "complex128")
    return b.graph(b("sum", b("square", b("abs", z))))


def tutorial(operation):
    def program():
        b = Builder()
        x = b.input("x", (4,))
        if operation == "cube":
            return b.graph(b("power", x, b.number(3.0)))
        return b.graph(b(operation, x))

    return program


def _affine(b, x, scale, shift):
    return b("add", b("multiply", x, scale), shift)


def layer_norm():
    b = Builder()
    x, g, c = b.input("X", (5, 4)), b.input("gamma", (4,)), b.input("beta", (4,))
    return b.graph(_affine(b, b("standardize", x, axes=(1,), eps=1e-5), g, c))


def batch_norm():
    b = Builder()
    x, g, c = b.input("X", (6, 4)), b.input("gamma", (4,)), b.input("beta", (4,))
    return b.graph(_affine(b, b("standardize", x, axes=(0,), eps=1e-5), g, c))


def attention(*lead):
    def program():
        b = Builder()
        q, k, v = (b.input(n, (*lead, 5, 4)) for n in "QKV")
        turned = b("transpose", k, permutation=(*range(len(lead)), len(lead) + 1, len(lead)))
        scores = b("divide", b("matmul", q, turned), b.number(2.0))
        return b.graph(b("matmul", b("softmax", scores, axis=len(lead) + 1), v))

    return program


def quadratic():
    b = Builder()
    a, x = b.input("A", (4, 4)), b.input("x", (4,))
    return b.graph(b("multiply", b.number(0.5), b("matmul", x, b("matmul", a, x))))


def branches():
    b = Builder()
    x = b.input("x", (5,))
    above = b("compare", x, b.number(0.0), relation=">")
    return b.graph(b("where", above, b("exp", x), b("multiply", x, x)))


def contraction():
    b = Builder()
    a, c, d = b.input("A", (2, 3, 4)), b.input("B", (4, 3)), b.input("d", (2,))
    return b.graph(b("einsum", a, c, d, subscripts="ijk,kj,i->j"))


def distances():
    """Squared distances of all pairs of rows."""
    b = Builder()
    x, y = b.input("X", (5, 4)), b.input("Y", (3, 4))
    d = b("subtract", b("reshape", x, shape=(5, 1, 4)), b("reshape", y, shape=(1, 3, 4)))
    return b.graph(b("exp", b("negate", b("sum", b("square", d), axes=(2,)))))


def block(layers=1):
    """Transformer blocks as PyTorch runs them: views, transposes and batched products."""
    n, t, h, d = 2, 5, 2, 4
    e = h * d
    b = Builder()

    def affine(x, w, size):
        return b("matmul", x, b("transpose", w, permutation=(1, 0)))

    def heads(x):
        split = b("reshape", x, shape=(n, t, h, d))
        turned = b("transpose", split, permutation=(0, 2, 1, 3))
        return b("reshape", turned, shape=(n * h, t, d))

    x = b.input("X", (n, t, e))
    for k in range(layers):
        wq, wk, wv, wo = (b.input(f"W{c}{k}", (e, e)) for c in "qkvo")
        g, c = b.input(f"g{k}", (e,)), b.input(f"c{k}", (e,))
        up, down = b.input(f"A{k}", (3 * e, e)), b.input(f"B{k}", (e, 3 * e))
        y = _affine(b, b("standardize", x, axes=(2,), eps=1e-5), g, c)
        q, key, v = (heads(affine(y, w, e)) for w in (wq, wk, wv))
        s = b("matmul", q, b("transpose", key, permutation=(0, 2, 1)))
        p = b("softmax", b("divide", s, b.number(2.0)), axis=2)
        o = b("reshape", b("matmul", p, v), shape=(n, h, t, d))
        o = b("reshape", b("transpose", o, permutation=(0, 2, 1, 3)), shape=(n, t, e))
        x = b("add", x, affine(o, wo, e))
        x = b("add", x, affine(b("silu", affine(x, up, 3 * e)), down, e))
    return b.graph(b("mean", b("square", x)))


def mixing():
    """A square matrix that mixes and is mixed: the same axis twice."""
    b = Builder()
    w, x = b.input("W", (3, 3)), b.input("X", (3, 3))
    return b.graph(b("matmul", b("softmax", b("matmul", x, w), axis=1), x))


LARGER = {
    "block": block,
    "two blocks": lambda: block(2),
}
PROGRAMS = {
    "linear": linear,
    "layer": layer,
    "perceptron": perceptron,
    "linear over time": linear_over_time,
    "cross entropy": cross_entropy,
    "cross entropy of probabilities": cross_entropy_of_probabilities,
    "squared error": squared_error,
    "complex affine": complex_affine,
    "affine in parts": affine_in_parts,
    "modulus": modulus,
    **{name: tutorial(name) for name in ("square", "exp", "sinh", "cube", "silu", "softplus")},
    "layer norm": layer_norm,
    "batch norm": batch_norm,
    "attention": attention(),
    "attention of heads": attention(2, 3),
    "quadratic": quadratic,
    "branches": branches,
    "contraction": contraction,
    "distances": distances,
    "mixing": mixing,
}
READING = {
    "layer norm": {"eps": 1e-5},
    "batch norm": {"eps": 1e-5},
    "cross entropy": {"sizes": {"onehot": ("j", 3)}},
}

__all__ = ["LARGER", "PROGRAMS", "READING", "block"]
