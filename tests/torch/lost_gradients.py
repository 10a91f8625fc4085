"""Defines PyTorch functions that lose gradients on marked lines, and correct functions."""

from __future__ import annotations

import copy
import ctypes
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import gradtools.torch as gt
from tests.support.lost_gradients import LostGradients

X = torch.tensor([0.5, -0.3, 0.8], dtype=torch.float64)
CASES = LostGradients(gt, X)
cause, healthy = CASES.cause, CASES.healthy


# --- functions of one line --------------------------------------------------------------------

ONE_LINE: dict[str, dict[str, Callable[[Any], Any]]] = {  # grouped by kind of finding
    "detached": {
        "dot_data": lambda x: (x * 2).data.sum(),
        "wrapped_in_a_parameter": lambda x: (nn.Parameter(x * 2) ** 2).sum(),
        "refused_copy": lambda x: copy.deepcopy(x * 2).sum(),
    },
    "left_framework": {
        "numpy_by_force": lambda x: torch.tensor(x.numpy(force=True) * 2).sum(),
        "through_math": lambda x: torch.tensor(math.sqrt(x[0])),
        "new_tensor_of_a_list_of_tensors": lambda x: torch.tensor([x[0], x[1] * 2]).sum(),
        "refused_by_numpy": lambda x: torch.from_numpy((x * 2).numpy()).sum(),
        "refused_by_asarray": lambda x: torch.from_numpy(np.asarray(x * 2)).sum(),
        "refused_by_dlpack": lambda x: torch.from_dlpack(x * 2).sum(),
    },
    "detached and left_framework, partly": {
        "one_term_through_numpy": lambda x: x.exp().sum() + torch.tensor(x.detach().numpy().sum()),
    },
    "left_framework, partly": {
        "one_term_through_a_number": lambda x: x.exp().sum() + float((x**2).sum()),
    },
    "integer_cast": {
        "cast_to_integer": lambda x: (10 * x).long().double().sum(),
        "refused_as_an_index": lambda x: sum(X[k] for k in range(x.sum())),
        "integers_that_should_require_grad": lambda x: x.long().requires_grad_().sum(),
    },
    "discrete": {
        "bucket": lambda x: torch.bucketize(x, torch.linspace(-1, 1, 5).to(x)).double().sum(),
        "index_of_topk": lambda x: x.topk(2).indices.double().sum(),
        "bernoulli_sample": lambda x: torch.bernoulli(torch.sigmoid(x)).sum(),
    },
    "zero_derivative": {
        "floor_division": lambda x: (x // 0.25).sum(),
    },
    "no_grad": {
        "distribution_sample": lambda x: torch.distributions.Normal(x, 1.0).sample().sum(),
    },
    "rule": {
        "rule_without_a_cotangent": lambda x: _Forgets.apply(x, x.new_ones(3)).sum(),
        "rule_by_a_name_of_its_own": lambda x: _forgets(x, x.new_ones(3)).sum(),
        "rule_that_is_marked": lambda x: _Marked.apply(x).sum(),
    },
    "zero": {
        "saturated_softmax": lambda x: torch.softmax(x * 100000.0, 0)[0],
        "sum_of_a_softmax": lambda x: torch.softmax(8 * x, 0).sum(),
    },
}
CASES.in_one_line(ONE_LINE)


# --- stopped -----------------------------------------------------------------------------


@cause()
def detach_in_place(x):
    y = x * 2
    y.detach_()  # <- detached
    return y.sum()


@cause()
def inner_gradient_without_a_graph(x):
    (g,) = torch.autograd.grad((x**3).sum(), x)  # <- inner_gradient
    return (g**2).sum()


@cause()
def gradient_read_from_dot_grad(x):
    (x**3).sum().backward()  # <- inner_gradient
    return (x.grad**2).sum()


class _Frozen(nn.Module):
    def forward(self, x):
        return (x * 2).detach()  # <- detached


class _Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3).double()
        self.blocks = nn.Sequential(nn.Tanh(), _Frozen())

    def forward(self, x):
        return self.blocks(self.first(x)).sum()


cause(scope=("_Net", "blocks", "1"), written=_Frozen)(_Net())


# --- values that leave PyTorch -----------------------------------------------------------


@cause()
def volume_fraction_through_numpy(x):
    image = x.detach().numpy()  # <- detached and left_framework
    binary = (image > 0.4).astype(np.float64)
    return (torch.from_numpy(binary).mean() - 0.5) ** 2


@cause()
def detached_and_later_through_numpy(x):
    y = (x * 2).detach()  # <- detached
    return torch.from_numpy(y.numpy() ** 2).sum()  # <- left_framework


@cause()
def new_tensor_of_a_tensor(x):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        y = torch.tensor(x)  # <- left_framework
    return (y**2).sum()


@cause()
def through_c(x):
    a = np.ascontiguousarray(x.detach().cpu().numpy())  # <- detached and left_framework
    out = np.empty_like(a)
    ctypes.memmove(out.ctypes.data, a.ctypes.data, a.nbytes)
    return torch.from_numpy(out).sum()


# --- integers and branches ---------------------------------------------------------------


@cause()
def branch_alone(x):
    if x.sum() > 0:  # <- discrete
        return torch.ones(())
    return torch.zeros(())


# --- gradients that are switched off -----------------------------------------------------


@cause()
def under_no_grad(x):
    with torch.no_grad():
        y = x * 2  # <- no_grad
    return (y**2).sum()


@torch.no_grad()
def _features(x):
    return torch.tanh(x)  # <- no_grad


@cause(written=_features)
def decorated_with_no_grad(x):
    return _features(x).sum()


@cause()
def refused_after_inference_mode(x):
    with torch.inference_mode():
        y = torch.ones(3, dtype=torch.float64)
    return (x * y).sum()  # <- no_grad


@cause()
def written_under_no_grad(x):
    out = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        out[:] = x  # <- no_grad
    return out.sum()


# --- writes that autograd does not record ------------------------------------------------


@cause()
def written_into_data(x):
    out = torch.zeros(3, dtype=torch.float64)
    out.data[:] = x * 2  # <- in_place_data
    return out.sum()


@cause()
def data_replaced(x):
    out = torch.zeros(3, dtype=torch.float64)
    out.data = x * 2  # <- in_place_data
    return out.sum()


@cause()
def changed_in_place(x):
    x += 1  # <- in_place_data
    return x.sum()


@cause()
def a_view_changed_in_place(x):
    x[0] = 0.0  # <- in_place_data
    return x.sum()


@cause()
def changed_after_it_was_saved(x):
    y = x.exp()
    z = y.square().sum()
    y.add_(1)
    (g,) = torch.autograd.grad(z, x, create_graph=True)  # <- in_place_data
    return g.sum()


# --- inner gradients and in-place writes that are refused --------------------------------


@cause()
def inner_gradient_of_what_is_detached(x):
    (g,) = torch.autograd.grad((x.detach() ** 2).sum(), x)  # <- detached
    return g.sum()


@cause()
def inner_gradient_of_something_else(x):
    w = torch.ones(3, requires_grad=True)
    (g,) = torch.autograd.grad((w**2).sum(), x)  # <- unused
    return g.sum()


@cause()
def inference_tensor_changed(x):
    with torch.inference_mode():
        y = torch.zeros(3, dtype=torch.float64)
    y.add_(x)  # <- no_grad
    return y.sum()


@cause()
def inference_tensor_that_should_require_grad(x):
    with torch.inference_mode():
        y = x * 2
    return y.requires_grad_().sum()  # <- no_grad


# --- rules -------------------------------------------------------------------------------


class _Forgets(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return x * w

    @staticmethod
    def backward(ctx, ct):
        return None, ct


_forgets = _Forgets.apply


class _Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x * 2
        ctx.mark_non_differentiable(y)
        return y

    @staticmethod
    def backward(ctx, ct):
        return ct


class _SinhRight(torch.autograd.Function):
    """A correct Function for sinh, which returns the intermediates of backward as outputs."""

    @staticmethod
    def forward(ctx, x):
        up, down = x.exp(), (-x).exp()
        ctx.save_for_backward(up, down)
        return (up - down) / 2, up, down

    @staticmethod
    def backward(ctx, ct, ct_up, ct_down):
        up, down = ctx.saved_tensors
        return ct * (up + down) / 2 + ct_up * up - ct_down * down


@healthy()
def derivative_of_a_rule_that_saves_outputs(x):
    (g,) = torch.autograd.grad(_SinhRight.apply(x)[0].sum(), x, create_graph=True)
    return (g**2).sum()


# --- the argument itself -----------------------------------------------------------------


@cause()  # <- unused
def reads_a_global(z):
    return (X**2).sum()


class _Holder:
    def __init__(self):
        self.weight = X

    def loss(self, weight):  # <- unused
        return (self.weight**2).sum()


cause(name="a method that reads an attribute", written=_Holder.loss)(_Holder().loss)


# --- gradients that are zero at these values ---------------------------------------------


@cause()
def all_of_it_is_set(x):
    y = x * 2
    y[:] = 1  # <- zero
    return y.sum()


# --- healthy -----------------------------------------------------------------------------


@healthy()
def an_old_buffer_is_filled_anew(x):
    buffer, ones = x.clone(), x.clone()
    buffer[:] = x.sin()
    ones[:] = 1
    return (buffer + ones).sum()


ONE_LINERS = {
    "filled_where_it_is_negative": lambda x: (x**2).masked_fill(x < 0, 0.0).sum(),
    "metrics_as_numbers": lambda x: {"loss": (x**2).sum(), "largest": float(x.max())},
    "gumbel_softmax_hard": lambda x: (F.gumbel_softmax(x, hard=True) * torch.arange(3)).sum(),
    "function_of_pytorch": lambda x: _Square.apply(x).sum(),
    "torch_cond": lambda x: torch.cond(x.sum() > 0, torch.sin, lambda x: x.cos(), (x,)).sum(),
    "normalised_by_a_number": lambda x: (x / x.abs().max().item()).square().sum(),
    "reparametrised_sample": lambda x: torch.distributions.Normal(x, 1.0).rsample().square().sum(),
    "tensor_of_a_shape": lambda x: x.sum() / torch.tensor(x.shape[0]) + x.new_tensor([1.0]).sum(),
}
for _name, _f in ONE_LINERS.items():
    healthy(name=_name)(_f)


@healthy()
def logging_by_item(x):
    loss = (x**2).sum()
    history = [loss.item()]
    print(f"loss {loss.item():.3f}, mean {sum(history)}")
    return loss


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() ** 2)

    @staticmethod
    def backward(ctx, ct):
        return 2 * ctx.saved_tensors[0] * ct
