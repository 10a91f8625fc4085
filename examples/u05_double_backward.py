"""Differentiates four custom rules twice, to show which values a rule may save.

The square saves its input, exp saves its output, and sinh saves the intermediates exp(x) and
exp(-x). The cube is an opaque kernel, and its derivative is another opaque kernel. A plain
``torch.autograd.Function`` that saves an intermediate is silently wrong at second order
(pytorch#76185), and a plain ``jax.custom_vjp`` has no forward mode. docs/double-backward.md
explains these cases.
"""

import numpy as np
from checks import every_derivative, refused
from common import claim, main

X, T = np.array([-1.2, 0.4, 1.0]), np.array([1.0, -2.0, 0.5])
RIGHT = 2 * np.cosh(2.0)
"""The second derivative of sinh(x)^2 at 1."""


def square(gt):
    f = gt.custom_rule(lambda x: x**2)
    f.defvjp(lambda x: (f(x), x), lambda x, ct: (2 * x * ct,))
    return f


def exp(gt):
    f = gt.custom_rule(lambda x: gt.xp.exp(x))

    def fwd(x):
        y = f(x)
        return y, y

    f.defvjp(fwd, lambda y, ct: (y * ct,))
    return f


def sinh(gt):
    f = gt.custom_rule(lambda x: (gt.xp.exp(x) - gt.xp.exp(-x)) / 2)

    def fwd(x):
        e, i = gt.xp.exp(x), gt.xp.exp(-x)
        return (e - i) / 2, (e, i)

    f.defvjp(fwd, lambda res, ct: (ct * (res[0] + res[1]) / 2,))
    return f


def cube(gt):
    """Returns the function x**3, with three kernels: the value, the vjp, and the vjp of the vjp."""
    f = gt.host_function(lambda x: x**3)
    backward = gt.host_function(lambda x, ct: 3 * x**2 * ct)
    double_backward = gt.host_function(
        lambda x, ct, v: (6 * x * ct * v, 3 * x**2 * v), out=lambda x, ct, v: (x, ct)
    )
    f.defvjp(lambda x: (f(x), x), lambda x, ct: (backward(x, ct),))
    backward.defvjp(
        lambda x, ct: (backward(x, ct), (x, ct)), lambda res, v: double_backward(*res, v)
    )
    return f


DERIVATIVES = {
    square: (lambda x: x**2, lambda x: 2 * x, lambda x: 2 + 0 * x),
    exp: (np.exp, np.exp, np.exp),
    sinh: (np.sinh, np.cosh, np.sinh),
    cube: (lambda x: x**3, lambda x: 3 * x**2, lambda x: 6 * x),
}


def show(gt, backend):
    results = {}
    for make, (value, first, second) in DERIVATIVES.items():
        print(f"  -- {make.__name__}")
        f, opaque = make(gt), make is cube
        by_hand = value(X).sum(), first(X), second(X) * T
        total = lambda x, f=f: f(x).sum()
        results[make.__name__] = every_derivative(
            gt, backend, total, X, T, by_hand, forward_twice=not opaque
        )
        {"torch": checked_by_torch, "jax": checked_by_jax}[backend](f, opaque)
    what_cannot_follow(gt, cube(gt))
    print("  -- without gradtools")
    ours = sinh(gt)
    {"torch": plain_torch, "jax": plain_jax}[backend](ours)
    found = float(gt.grad(gt.grad(lambda x: ours(x) ** 2))(gt.asarray(np.float64(1.0))))
    claim(
        f"gradtools: d2/dx2 sinh(x)^2 at 1 is {found:.4f}, as expected", abs(found - RIGHT) < 1e-12
    )
    return results


def what_cannot_follow(gt, f):
    """Shows which derivatives need more kernels than value, vjp and double backward."""
    import gradtools

    third = gt.grad(gt.grad(gt.grad(f)))
    text = refused(lambda: third(gt.asarray(np.float64(2.0))), Exception, "no rule")
    claim("a third derivative of the cube raises an error that names the kernel", text)
    one = gt.asarray(np.float64(1.0))
    twice = lambda: gt.jvp(lambda x: gt.jvp(f, (x,), (one,))[1], (one,), (one,))
    text = refused(twice, gradtools.GradtoolsError, "no rule")
    claim("forward mode over forward mode also raises an error", text)


def checked_by_torch(f, opaque):
    import torch

    x = torch.tensor(X, requires_grad=True)
    batched = {"check_batched_grad": not opaque}
    first = torch.autograd.gradcheck(
        f, x, check_forward_ad=True, check_batched_forward_grad=not opaque, **batched
    )
    second = torch.autograd.gradgradcheck(
        f, x, check_fwd_over_rev=True, check_rev_over_rev=True, **batched
    )
    claim("torch.autograd.gradcheck and gradgradcheck pass, also in forward mode", first and second)


def checked_by_jax(f, opaque):
    from jax.test_util import check_grads

    if opaque:
        check_grads(f, (X,), order=1, modes=["fwd", "rev"])
        check_grads(f, (X,), order=2, modes=["rev"])
        claim("jax.test_util.check_grads passes to order 2", True)
    else:
        check_grads(f, (X,), order=3, modes=["fwd", "rev"])
        claim("jax.test_util.check_grads passes to order 3 in both modes", True)


def plain_torch(ours):
    """Computes the second derivative of a plain autograd.Function that saves intermediates."""
    import torch

    class Sinh(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            e, i = x.exp(), (-x).exp()
            ctx.save_for_backward(e, i)
            return (e - i) / 2

        @staticmethod
        def backward(ctx, ct):
            e, i = ctx.saved_tensors
            return ct * (e + i) / 2

    x = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(Sinh.apply(x) ** 2, x, create_graph=True)
    (found,) = torch.autograd.grad(slope, x)
    claim(
        f"a plain torch.autograd.Function silently returns {float(found):.4f}",
        abs(float(found) - 2 * np.cosh(1.0) ** 2) < 1e-12,
    )


def plain_jax(ours):
    """Shows that a rule for sinh, implemented with jax.custom_vjp, has no forward mode."""
    import jax

    sinh = jax.custom_vjp(lambda x: (jax.numpy.exp(x) - jax.numpy.exp(-x)) / 2)
    sinh.defvjp(
        lambda x: (sinh(x), (jax.numpy.exp(x), jax.numpy.exp(-x))),
        lambda res, ct: (ct * (res[0] + res[1]) / 2,),
    )
    forward = lambda f: lambda: jax.jvp(f, (1.0,), (1.0,))
    text = refused(forward(sinh), TypeError, "forward-mode")
    claim("a plain jax.custom_vjp has no forward mode", text)
    claim(
        "gradtools derives forward mode by transposing the rule",
        abs(forward(ours)()[1] - np.cosh(1.0)) < 1e-12,
    )


if __name__ == "__main__":
    main(show)
