"""The kinds of lost gradients that `why_zero` reports, each with its reason and its fix."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from gradtools.code_origin import Source


@dataclass(frozen=True)
class FindingKind:
    """A kind of loss.

    Attributes:
        reason: What happened, as a clause.
        fix: What to write instead.
        numerical: Whether it depends on the values, so that other values may have a gradient.
        headline: The title for one leaf and for several, if not "gets no gradient".
        has_place: Whether it is located at a line of the program.
    """

    reason: str
    fix: str
    numerical: bool = False
    headline: tuple[str, str] | None = None
    has_place: bool = True


_NOT_TRAINED = ("is not trained:", "are not trained:")
_IS_NAN = "gets a gradient that is NaN or infinite:", "get gradients that are NaN or infinite:"

_at_values = partial(FindingKind, numerical=True)
_in_training = partial(FindingKind, has_place=False)

KINDS: dict[str, FindingKind] = {
    "detached": FindingKind(
        "the gradient is stopped on purpose",
        "remove the detach or stop_gradient, or stop only what must stay constant",
    ),
    "left_framework": FindingKind(
        "the computation leaves the framework, which sees only a constant come back",
        "write it with the framework's own operations; where it must be NumPy, give it a rule "
        "(host_function, custom_rule), or straight_through(f, surrogate) if it is discrete",
    ),
    "integer_cast": FindingKind(
        "a floating array becomes an integer or a boolean, which has no derivative",
        "cast later, after what is to be differentiated, or use straight_through(f)",
    ),
    "discrete": FindingKind(
        "a discrete step: its result jumps and is constant in between",
        "use a smooth version (sigmoid for a comparison, softmax for argmax or one-hot), or "
        "straight_through(f, surrogate)",
    ),
    "zero_derivative": FindingKind(
        "its derivative is zero everywhere",
        "use straight_through(f), which keeps the value and passes the gradient on",
    ),
    "no_grad": FindingKind(
        "it runs while gradients are switched off", "move it out of no_grad or inference_mode"
    ),
    "inner_gradient": FindingKind(
        "a gradient is taken inside of f, and has no graph of its own to be differentiated",
        "pass create_graph=True to torch.autograd.grad or backward, or use gt.grad; where the "
        "graph of the inner function is too large, use gt.frozen of it, or gt.mixed_partial",
    ),
    "piecewise_linear": FindingKind(
        "a derivative is taken inside of f of a piecewise linear function (relu, abs, max), "
        "whose second derivative is zero",
        "use a smooth activation: tanh, gelu, silu, softplus",
    ),
    "constant_derivative": FindingKind(
        "it drops out of a derivative that is taken inside of f, like an added constant",
        "use the value itself in the loss as well, if it should be trained",
    ),
    "reentrant": FindingKind(
        "a reentrant checkpoint of which no input requires grad computes without a graph",
        "pass use_reentrant=False, or use gradtools' checkpoint; else let an input require grad",
    ),
    "in_place_data": FindingKind(
        "an array is overwritten in a way that differentiation does not see",
        "write y = ... instead of changing x.data in place",
    ),
    "rule": FindingKind(
        "its own rule carries no derivative to this input",
        "return a cotangent for this input in the rule instead of None",
    ),
    "unused": FindingKind(
        "nothing of the argument flows to the output",
        "use the argument, or differentiate another one",
    ),
    "overwritten": FindingKind(
        "every entry of it is overwritten, so that nothing of it is left",
        "overwrite a part, add instead of setting, or set before what is to be differentiated",
    ),
    "captured": FindingKind(
        "f reads this array from outside instead of taking it as its argument",
        "use the argument that f is given: what is captured is a constant to it",
    ),
    "host_number": FindingKind(
        "the result is a NumPy or Python number, which carries no derivative",
        "return the framework's own array",
    ),
    # at these values
    "multiplied_by_zero": _at_values(
        "it is multiplied by zero at these values, or by a number so small that the dtype rounds "
        "the product to zero",
        "see where the other factor becomes zero; start it elsewhere, mask later, or scale the "
        "loss where products of small numbers underflow. A trained factor that starts at zero on "
        "purpose, as in LoRA and ReZero, moves in the first step",
    ),
    "dead": _at_values(
        "it is flat at these values: relu below zero, clip outside of its bounds, a sigmoid or an "
        "exponential far from 0, a softmax of which all probabilities are added up",
        "use a leaky or smooth version (leaky_relu, gelu, softplus), or scale what enters",
    ),
    "cancelled": _at_values(
        "what reaches it over several paths adds up to zero at these values",
        "look for a constant in disguise, such as the sum of a softmax, or x - x",
    ),
    "empty": _at_values(
        "none of its entries is selected by an index, a slice, a mask or a maximum",
        "check what is selected at these values",
    ),
    "nan": _at_values(
        "from here on its gradient is NaN or infinite at these values",
        "keep what enters away from where the slope is infinite; where a mask selects it away, put "
        "a harmless value in first, for a cotangent of zero times an infinite slope is NaN: "
        "where(x > 0, f(where(x > 0, x, 1)), 0)",
        headline=_IS_NAN,
    ),
    "nan_value": _at_values(
        "its result is NaN or infinite at these values, and so is everything computed from it",
        "see what enters: a negative number in sqrt or log, a zero that is divided by, a number "
        "too large for exp or for the dtype; clip it, or mask it before the operation",
        headline=_IS_NAN,
    ),
    # of a model
    "unread": _in_training(
        "the loss does not use it",
        "use it in the computation of the loss, or remove it from the model",
    ),
    "frozen": _in_training(
        "its requires_grad is False",
        "call requires_grad_(True) if it is to be trained, else leave it out of the optimizer",
    ),
    "plain_list": _in_training(
        "it is in a plain list, tuple or dict, in which a module does not see its parts",
        "use nn.ModuleList, nn.ModuleDict or nn.ParameterList",
        headline=_NOT_TRAINED,
    ),
    "unregistered": _in_training(
        "it requires grad but is not a parameter, so parameters() does not list it",
        "make it a parameter after all other operations, self.name = nn.Parameter(tensor), and "
        "move the module instead of the tensor",
        headline=_NOT_TRAINED,
    ),
    "buffer": _in_training(
        "it requires grad but is registered as a buffer, which parameters() does not list",
        "register it as an nn.Parameter",
        headline=_NOT_TRAINED,
    ),
    "not_optimized": _in_training(
        "no step of the optimizer changes it",
        "create the optimizer with all parameters of the model after its last layer was added, or "
        "call add_param_group; check what masks and labels leave out",
        headline=_NOT_TRAINED,
    ),
    "other_model": _in_training(
        "the optimizer holds it, and it is no parameter of the model",
        "create the optimizer with the parameters of the trained model after that was copied, "
        "loaded, wrapped or moved",
        headline=("is optimized without effect:", "are optimized without effect:"),
    ),
}

# The fix for a NaN gradient, by the names of the operations at which it becomes NaN.
_MASKED_FIRST = (
    "where a mask selects it away, put a harmless value in first, for a cotangent of zero times an "
    "infinite slope is NaN: "
)
_NAN_FIXES: dict[str, str] = {
    "sqrt rsqrt cbrt norm vector_norm cdist pdist pairwise_distance hypot power pow float_power": (
        "the slope is infinite at 0: add an epsilon inside, sqrt(x + eps), or differentiate the "
        f"square; {_MASKED_FIRST}where(x > 0, sqrt(where(x > 0, x, 1)), 0)"
    ),
    "deviation std": (
        "the slope is infinite where all entries are equal, or there is one: use "
        "sqrt(variance + eps)"
    ),
    "log log2 log10 log1p xlogy xlog1py logit entr": (
        "the slope is infinite at 0: use log(x + eps), or work with logits (log_softmax, "
        f"logsumexp, softplus); {_MASKED_FIRST}where(x > 0, log(where(x > 0, x, 1)), 0)"
    ),
    "divide reciprocal": (
        f"it is divided by 0: add an epsilon; {_MASKED_FIRST}"
        "where(d != 0, a / where(d != 0, d, 1), 0)"
    ),
    "multiply matmul einsum dot_general where select masked_fill": (
        "zero meets an infinite or NaN factor: see where that comes from (an overflow, log(0), a "
        "division by 0), and mask it before it is multiplied: where(mask, x, 0) * y"
    ),
    "arcsin arccos arctanh erfinv": (
        "the slope is infinite at -1 and 1: clip what enters to inside of these bounds"
    ),
    "arccosh": "the slope is infinite at 1: clip what enters to above 1",
    "arctan2 angle": (
        f"there is no slope at (0, 0): {_MASKED_FIRST}arctan2(y, where(is_origin, 1, x))"
    ),
    "exp exp2 expm1 sinh cosh": (
        "it overflows: subtract the maximum first, or use logsumexp, log_softmax, softplus"
    ),
    "eigh eig eigvalsh linalg_eigh linalg_eig": (
        "the derivative of eigenvectors divides by differences of eigenvalues, which has no value "
        "where they are repeated: make them distinct (add a small diagonal matrix of distinct "
        "numbers), or use what does not depend on the choice of eigenvectors (the eigenvalues "
        "alone, a matrix function)"
    ),
    "svd linalg_svd": (
        "the derivative of singular vectors divides by differences of singular values, and by the "
        "values, which has no value where they are repeated or zero: make them distinct, or use "
        "what does not depend on the choice of vectors (the singular values alone, U @ Vh)"
    ),
    "qr cholesky solve inverse det slogdet logdet pinv triangular_solve cholesky_solve lu": (
        "the matrix is singular: add a small multiple of the identity"
    ),
}
_NAN_FIX = {name: text for names, text in _NAN_FIXES.items() for name in names.split()}

# The fixes of single functions of PyTorch, by kind and operation.
_FIXES = {
    ("no_grad", "sample"): (
        "Distribution.sample draws under no_grad: use rsample, which is reparametrized, or the "
        "score function, log_prob(sample) * reward"
    ),
    ("no_grad", "load_state_dict"): (
        "load_state_dict copies numbers under no_grad: call the module at other parameters by "
        "make_functional(module) or torch.func.functional_call"
    ),
    ("detached", "Parameter"): (
        "nn.Parameter makes a new leaf of a computed tensor: register what it is computed from as "
        "the parameter, or pass the tensor itself (make_functional, torch.func.functional_call)"
    ),
    ("left_framework", "tensor"): (
        "torch.tensor copies numbers: join tensors by torch.stack or torch.cat, and use a tensor "
        "itself rather than a copy"
    ),
}


@dataclass(frozen=True)
class Finding:
    """One place at which a gradient is lost.

    Attributes:
        argument: The leaf that loses its gradient, such as "argument 0['w']".
        kind: A key of `KINDS`.
        operation: The operation's name, in the framework's own word.
        source: The innermost line of the user's own code, if known: ``.file``, ``.line`` and
            ``.function``.
        scope: The modules it runs in, outermost first.
        whole: Whether the whole gradient is lost, not only one term.
        detail: Additional text: the framework's own message, a name.
        primitive: The elementary operation inside of `operation` that caused it, by its
            framework-neutral name; empty if it is the same.
    """

    argument: str
    kind: str
    operation: str
    source: Source | None = None
    scope: tuple[str, ...] = ()
    whole: bool = True
    detail: str = ""
    primitive: str = ""

    @property
    def reason(self) -> str:
        """What happened there."""
        return KINDS[self.kind].reason

    @property
    def fix(self) -> str:
        """What to write instead."""
        operation = self.operation.partition(",")[0]
        if self.kind == "nan":
            names = self.primitive, operation
            return next(filter(None, map(_NAN_FIX.get, names)), KINDS["nan"].fix)
        return _FIXES.get((self.kind, operation), KINDS[self.kind].fix)

    @property
    def numerical(self) -> bool:
        """Whether it depends on the values: another point may have a gradient."""
        return KINDS[self.kind].numerical
