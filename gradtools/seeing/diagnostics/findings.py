"""Defines the kinds of lost gradients that `why_zero` reports, each with a reason and a fix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from gradtools.code_origin import Source


@dataclass(frozen=True)
class FindingKind:
    """A kind of lost gradient, such as "detached".

    Attributes:
        reason: The reason for the lost gradient, as a clause without a period.
        fix: The suggested change to the user's code.
        numerical: Whether the gradient is lost only at the given values of the inputs.
        headline: The title in the report for one leaf, and the title for several leaves. If None,
            the report uses a default title such as "gets no gradient".
        has_place: Whether the report prints the source line of the finding.
    """

    reason: str
    fix: str
    numerical: bool = False
    headline: tuple[str, str] | None = None
    has_place: bool = True


_NOT_TRAINED = ("is not trained:", "are not trained:")
_in_training = partial(FindingKind, has_place=False)

KINDS: dict[str, FindingKind] = {
    "detached": FindingKind(
        "the gradient is stopped on purpose",
        "remove the detach or stop_gradient, or stop only values that must be constant",
    ),
    "left_framework": FindingKind(
        "the computation leaves the framework, and its result is a constant for the framework",
        "use operations of the framework; for a NumPy function write a rule (host_function, "
        "custom_rule), or use straight_through(f, surrogate) if the function is discrete",
    ),
    "integer_cast": FindingKind(
        "a floating array becomes an integer or a boolean, which has no derivative",
        "cast after the differentiated part of the computation, or use straight_through(f)",
    ),
    "discrete": FindingKind(
        "a discrete operation: its result is piecewise constant",
        "use a smooth version (sigmoid for a comparison, softmax for argmax or one-hot, softplus "
        "for a relu that is differentiated twice), or straight_through(f, surrogate)",
    ),
    "zero_derivative": FindingKind(
        "the derivative of the operation is zero everywhere",
        "use straight_through(f), which keeps the value and passes the gradient on",
    ),
    "no_grad": FindingKind(
        "the operation runs while gradients are disabled",
        "move the operation out of no_grad or inference_mode; pass use_reentrant=False to a "
        "checkpoint",
    ),
    "inner_gradient": FindingKind(
        "the loss computes this gradient without a graph, so it cannot be differentiated",
        "pass create_graph=True to torch.autograd.grad or backward, or use gt.grad; if the "
        "graph of the inner function is too large, apply gt.frozen to it, or use gt.mixed_partial",
    ),
    "in_place_data": FindingKind(
        "an array is overwritten in a way that automatic differentiation does not record",
        "write y = ... instead of writing to x.data",
    ),
    "rule": FindingKind(
        "the custom rule has no derivative for this input",
        "return a cotangent for this input in the rule instead of None",
    ),
    "bridged": FindingKind(
        "the gradient is lost inside the function of the other framework",
        "call why_zero of this framework on the original function: gradtools.torch.why_zero(f, x) "
        "for to_jax(f), gradtools.jax.why_zero(f, x) for to_torch(f)",
    ),
    "edit": FindingKind(
        "a gradient edit has no derivative with respect to its scale, bound or replacement",
        "pass a constant, or use a custom_rule that returns a cotangent for this input",
    ),
    "unused": FindingKind(
        "no data flows from the argument to the output",
        "use the argument that f receives, not a captured array in its place, and return the "
        "framework's own array, not a NumPy or Python number",
    ),
    # kinds of lost gradients that occur only at the given values
    "zero": FindingKind(
        "the operation receives a gradient and returns only zeros at these values",
        "check the operands: a factor of zero, a negative input of a relu, a clipped or saturated "
        "function, entries that are not selected or are overwritten, terms that cancel",
        numerical=True,
    ),
    "nan": FindingKind(
        "from this operation on, arrays or gradients are NaN or infinite at these values",
        "keep the operand away from points at which the function or its slope is infinite (add an "
        "epsilon inside, clip, subtract the maximum); if a mask hides the entry, replace the "
        "operand, where(x > 0, f(where(x > 0, x, 1)), 0): 0 * inf is NaN in the backward pass",
        numerical=True,
        headline=(
            "gets a gradient that is NaN or infinite:",
            "get gradients that are NaN or infinite:",
        ),
    ),
    # kinds of findings about the parameters of a model
    "unread": _in_training(
        "no recorded operation of the loss uses the parameter",
        "use the parameter in the loss, or remove the parameter from the model; pass a parameter "
        "that a host kernel reads to the host function as an argument",
    ),
    "frozen": _in_training(
        "requires_grad of the parameter is False",
        "call requires_grad_(True) to train the parameter, or remove it from the optimizer",
    ),
    "unregistered": _in_training(
        "the tensor requires grad, but parameters() does not list the tensor",
        "keep layers in an nn.ModuleList or nn.ModuleDict, not in a list or dict, and tensors in "
        "an nn.ParameterList; apply nn.Parameter to a single tensor after all other operations, "
        "self.name = nn.Parameter(tensor); or pass a computed tensor as an argument",
        headline=_NOT_TRAINED,
    ),
    "not_optimized": _in_training(
        "the optimizer does not update the parameter",
        "create the optimizer with all parameters of the model after its last layer was added, or "
        "call add_param_group; check the masks, labels and learning rates of the optimizer",
        headline=_NOT_TRAINED,
    ),
    "raw_update": _in_training(
        "the optimizer passes the gradient of the parameter through as its update, as optax.masked "
        "does outside of the mask; optax.apply_updates then adds the gradient to the parameter",
        "to freeze the parameter, use optax.set_to_zero() in optax.multi_transform or "
        "optax.partition, or chain optax.masked(optax.set_to_zero(), inverted_mask)",
        headline=(
            "moves in the direction of its gradient:",
            "move in the direction of their gradients:",
        ),
    ),
    "other_model": _in_training(
        "the optimizer contains a tensor that is not a parameter of the model",
        "create the optimizer with the parameters of the trained model after the model was "
        "copied, loaded, wrapped or moved",
        headline=("is optimized without effect:", "are optimized without effect:"),
    ),
}

# Fixes for specific PyTorch functions, keyed by the kind of finding and the operation.
_FIXES = {
    ("no_grad", "sample"): (
        "Distribution.sample draws under no_grad: use rsample, which is reparametrized, or the "
        "score function, log_prob(sample) * reward"
    ),
    ("no_grad", "load_state_dict"): (
        "load_state_dict copies numbers under no_grad: call the module with other parameters "
        "through make_functional(module) or torch.func.functional_call"
    ),
    ("detached", "Parameter"): (
        "nn.Parameter makes a new leaf from a computed tensor: register as parameters the tensors "
        "from which it is computed, or pass the computed tensor itself (make_functional, "
        "torch.func.functional_call)"
    ),
    ("not_optimized", "lr"): (
        "set lr of the parameter group to a positive number; if lr starts at zero, call why_zero "
        "after the first step of the schedule"
    ),
    ("unread", "other arrays"): "pass the model whose arrays the loss reads as model=",
    ("left_framework", "tensor"): (
        "torch.tensor copies numbers: join tensors with torch.stack or torch.cat, and use a tensor "
        "itself rather than a copy"
    ),
}


@dataclass(frozen=True)
class Finding:
    """An operation at which the gradient of one leaf is lost.

    Attributes:
        argument: The name of the leaf whose gradient is lost, such as "argument 0['w']".
        kind: A key of `KINDS`.
        operation: The framework's name of the operation, such as "detach".
        source: The innermost line of the user's own code, if known: ``.file``, ``.line`` and
            ``.function``.
        scope: The names of the modules that contain the operation, outermost first.
        whole: Whether the whole gradient of the leaf is lost. If False, one term of the gradient is
            lost.
        detail: Additional text for the report, such as the framework's own error message.
    """

    argument: str
    kind: str
    operation: str
    source: Source | None = None
    scope: tuple[str, ...] = ()
    whole: bool = True
    detail: str = ""

    @property
    def reason(self) -> str:
        """Returns the reason why the gradient is lost."""
        return KINDS[self.kind].reason

    @property
    def fix(self) -> str:
        """Returns the suggested change to the user's code."""
        operation = self.operation.partition(",")[0]
        return _FIXES.get((self.kind, operation), KINDS[self.kind].fix)

    @property
    def numerical(self) -> bool:
        """Returns whether the gradient is lost only at the given values of the inputs."""
        return KINDS[self.kind].numerical
