"""why_zero and gradient_graph accept functions with tensors of any memory layout."""

import pytest
import torch

import gradtools.torch as gt

D = torch.float64
X = torch.tensor([1.0, 2.0, 3.0], dtype=D)
LOOKS = {
    "why_zero": lambda f: gt.why_zero(f, X),
    "gradient_graph": lambda f: gt.gradient_graph(f, X),
}


def _inference():
    with torch.inference_mode():
        return torch.ones(3, dtype=D)


READ = {
    "expanded": lambda: torch.tensor([2.0], dtype=D).expand(3),
    "expanded number": lambda: torch.tensor(2.0, dtype=D).expand(3),
    "expanded with a graph": lambda: torch.ones(1, dtype=D, requires_grad=True).expand(3),
    "overlapping": lambda: torch.arange(5.0, dtype=D).as_strided((3, 3), (1, 1)),
    "transposed": lambda: torch.arange(6.0, dtype=D).reshape(2, 3).t(),
    "conjugated": lambda: torch.tensor([1 + 2j, 2j, 3.0], dtype=torch.complex128).conj(),
    "negated": lambda: torch.tensor([1 + 2j, 2j, 3.0], dtype=torch.complex128).conj().imag,
    "number": lambda: torch.tensor(2.0, dtype=D),
    "made in inference mode": _inference,
    "subclass": lambda: torch.ones(3, dtype=D).as_subclass(type("Own", (torch.Tensor,), {})),
    "parameter": lambda: torch.nn.Parameter(X.clone()),
    "sparse": lambda: X.to_sparse(),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("kind", READ)
def test_a_tensor_may_be_read_by_an_operation_in_place(look, kind):
    t = READ[kind]()
    before = t.detach().to_dense().tolist()

    def f(x):
        y = torch.zeros(t.shape, dtype=t.dtype)
        y += t
        return (y.abs().sum() * (x * x).sum()).as_subclass(torch.Tensor)

    LOOKS[look](f)
    assert t.detach().to_dense().tolist() == before


class _Counts(torch.nn.Module):
    """A module with a buffer and an expanded view of it as another buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1, dtype=D))
        self.register_buffer("wide", self.count.expand(3))

    def forward(self, x):
        with torch.no_grad(), torch.inference_mode(self.count.is_inference()):
            self.count += 1
        return x * x


@pytest.mark.parametrize("inference", [False, True])
def test_chunked_puts_back_a_module_whose_buffers_are_expanded_or_of_inference_mode(inference):
    with torch.inference_mode(inference):
        module = _Counts()
    x = torch.stack([X, X])
    grads = gt.grad(lambda x: gt.chunked(module, 1)(x).sum())(x)
    torch.testing.assert_close(grads, 2 * x)
    assert module.count.item() == 2 and module.wide.tolist() == [2, 2, 2]
