"""Errors of the user's code are not changed; errors of PyTorch get an explanation."""

import pytest
import torch

import gradtools.torch as gt
from gradtools import GradtoolsError

X = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
PHRASES = [
    "must implement the jvp function",
    "modified by an inplace operation",
    "Trying to use forward AD with cat that does not support it",
    "these require grad",
    "element 0 of tensors does not require grad and does not have a grad_fn",
    "marked with @once_differentiable",
    "derivative for cat is not implemented",
    "Cannot access data pointer",
    "support saved tensor hooks",
    "a leaf Variable that requires grad",
]
WAYS = {
    "grad": lambda f: gt.grad(f)(X),
    "jvp": lambda f: gt.jvp(f, (X,), (X,)),
    "linearize": lambda f: gt.linearize(f, X),
    "functorch": lambda f: torch.func.grad(lambda x: gt.grad(f)(x).sum())(X),
    "frozen": lambda f: gt.frozen(f)(X),
    "chunked": lambda f: gt.grad(lambda x: gt.chunked(f, 1)(x).sum())(X),
    "checkpoint": lambda f: gt.grad(lambda x: gt.checkpoint(f)(x).sum())(X),
    "straight_through": lambda f: gt.grad(lambda x: gt.straight_through(f)(x).sum())(X),
    "straight_through in functorch": lambda f: torch.func.grad(
        lambda x: gt.straight_through(f)(x).sum()
    )(X),
}


class _Own(NotImplementedError):
    pass


def _raised(way, f):
    with pytest.raises(BaseException) as caught:
        way(f)
    return caught.value


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [RuntimeError, _Own])
def test_an_error_of_f_with_pytorchs_words_is_the_same_error(way, kind):
    for phrase in PHRASES:
        own = kind(phrase)

        def f(x):
            raise own

        assert _raised(WAYS[way], f) is own


@pytest.mark.filterwarnings("ignore:frozen")
@pytest.mark.parametrize("phrase", PHRASES)
def test_an_error_of_a_users_backward_or_jvp_is_the_same_error(phrase):
    own = RuntimeError(phrase)

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.exp()

        @staticmethod
        def backward(ctx, ct):
            raise own

        @staticmethod
        def jvp(ctx, dx):
            raise own

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx, ct):
            return Raises.apply(ctx.saved_tensors[0]) * ct

    f = lambda x: Raises.apply(x).sum()
    G = gt.frozen(lambda x: Twice.apply(x).sum())
    second = lambda f: gt.grad(lambda x: gt.grad(G)(x).sum())(X)
    for way in (WAYS["grad"], WAYS["jvp"], second):
        assert _raised(way, f) is own


def test_pytorchs_refusal_keeps_its_type_and_is_ours_too():
    class ReverseOnly(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.exp()

        @staticmethod
        def backward(ctx, ct):
            return ct

    error = _raised(WAYS["jvp"], lambda x: ReverseOnly.apply(x).sum())
    assert isinstance(error, GradtoolsError) and isinstance(error, NotImplementedError)
    error = _raised(WAYS["grad"], lambda x: torch.autograd.grad(x.sum().detach(), x)[0].sum())
    assert isinstance(error, GradtoolsError) and type(error.__cause__) is RuntimeError
    assert isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError)


def test_an_f_that_leaves_through_numpy_is_told_so():
    error = _raised(WAYS["grad"], lambda x: torch.as_tensor(x.numpy()).sum())
    assert isinstance(error, GradtoolsError) and "converts a tensor with numpy()" in str(error)


# The keys are parts of error messages; the functions of (w, x) do not run under vmap.
UNMAPPED = {
    "is not possible because there exists": lambda w, x: (
        torch.zeros(3, dtype=x.dtype).scatter_(0, torch.tensor([1]), x[:1]) * w
    ),
    "doesn't match the broadcast shape": lambda w, x: torch.zeros(3, dtype=x.dtype).add_(x) * w,
    "doesn't have storage": lambda w, x: w * float(x.numpy()[0]),
    "mutating directly": lambda w, x: w * setattr_data(torch.zeros_like(w), x),
    "stack expects each tensor": lambda w, x: w.repeat_interleave((x[:1] > 0) + 1),
    "different inplace randomness": lambda w, x: w * 0 * torch.zeros(3).normal_() + x,
    "over torch.allclose": lambda w, x: w * x * torch.allclose(x.detach(), x.detach()),
    "calling .item()": lambda w, x: w * x[0].item(),
}


def setattr_data(y, x):
    y.data = x
    return y


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("words", UNMAPPED)
def test_an_operation_that_vmap_rejects_is_told_the_plain_loop(words):
    f = lambda w, x: UNMAPPED[words](w, x).sum()
    rows = torch.stack([X, X - 1.5])
    error = _raised(lambda f: gt.per_example_grad(f)(X, rows), f)
    assert isinstance(error, GradtoolsError) and "ass chunk_size=1" in str(error)
    assert words in str(error) and str(error).startswith("per_example_grad: ")
    assert gt.per_example_grad(f, chunk_size=1)(X, rows).shape == rows.shape


class Scatters(torch.autograd.Function):
    """A Function for x^2 whose backward pass writes in place into a new tensor."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, ct):
        into = torch.zeros(3, dtype=torch.float64)
        return 2 * ctx.saved_tensors[0] * into.scatter_(0, torch.arange(3), ct)


def hessian(f, mode):
    return gt.hessian(lambda x: (f(x) ** 2).sum())


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("operator", [gt.jacobian, hessian])
def test_a_backward_pass_that_vmap_rejects_is_told_the_plain_loop(operator):
    f = lambda x: Scatters.apply(x) * x
    error = _raised(lambda f: operator(f, mode="reverse")(X), f)
    assert isinstance(error, GradtoolsError) and "Pass chunk_size=1" in str(error)


def test_a_mismatch_of_shapes_outside_of_vmap_is_pytorchs_own_error():
    f = lambda x: torch.zeros(3, dtype=x.dtype).add_(x.expand(2, 3)).sum()
    error = _raised(WAYS["grad"], f)
    assert type(error) is RuntimeError and "broadcast shape" in str(error)
