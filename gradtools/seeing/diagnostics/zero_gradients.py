"""Defines the public operator `why_zero`, which reports where gradients are lost."""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import Any

from gradtools.arguments.checks import normalized_argnums
from gradtools.arguments.wording import describe
from gradtools.backend import Operators
from gradtools.errors import GradtoolsError
from gradtools.seeing.diagnostics.diagnosis import Diagnosis, diagnosed, recording_of
from gradtools.seeing.diagnostics.report import GradientReport
from gradtools.seeing.diagnostics.training import trained
from gradtools.seeing.graphs.program import Framework, LeafProgram


class SeeingOperators(Operators):
    """Defines `why_zero` for one backend, PyTorch or JAX."""

    def why_zero(
        self,
        f: Any,
        *args: Any,
        argnums: int | tuple[int, ...] = 0,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> GradientReport:
        """Finds the lines at which a gradient is lost, becomes zero, or becomes NaN.

        The report lists arguments and parameters that have no gradient, or whose gradient is zero,
        NaN or infinite at these values. It also lists scalar summands of the loss that depend on
        the arguments only through operations without a derivative (``.item()``, a comparison, an
        argmax), and gradient edits that pass no gradient to any leaf. Each finding contains a
        source line, the kind of lost gradient and a suggested fix. A summand whose whole gradient
        is stopped by `detach`, `stop_gradient` or `no_grad` is reported as a note. A `detach` or
        `stop_gradient` on one part of an array that is otherwise differentiated (as in
        straight-through estimators, targets, masks and normalizing constants) is not reported. f
        may run several times; its changes to random streams, buffers and modules are undone.

        To examine a training step, pass the model as `model` or as f, or pass a closure without
        arguments that computes the loss. The parameters are then examined instead of the arguments.
        The report then lists parameters that the loss does not read, parameters whose gradient is
        lost, parameters missing from the optimizer, tensors of another model in the optimizer, and
        tensors that require grad but are not parameters, such as tensors in a plain list. Gradients
        that may be stopped intentionally, such as gradients of frozen parameters, are listed in the
        report's notes.

        Args:
            f: A function of pytrees of arrays, a module, or a closure without arguments.
            *args: Arguments of f.
            argnums: The position or positions of the differentiated arguments, whose leaves are
                floating or complex.
            model: The trained model, or a tuple or dict of models and arrays. In JAX, the model
                that f captures, or a pytree of parameters.
            optimizer: PyTorch: an optimizer or a list of optimizers. JAX: an optax gradient
                transformation or an `nnx.Optimizer`. Without `model`, the examined arrays are the
                parameters that f captures or the argument that contains the parameters, as in
                ``why_zero(loss, params, optimizer=opt)``.
            **kwargs: Keyword arguments of f.

        Returns:
            A `GradientReport`, which is falsy if no gradient is lost. ``.findings`` contains one
            finding per leaf and cause, with the attributes ``argument``, ``kind``, ``source``
            (``.file``, ``.line``, ``.function``) and ``fix``. ``str()`` formats the report as text,
            and ``.to_json()`` formats the report as JSON.

        Raises:
            GradtoolsError: argnums is out of range or names an integer argument; f raises an error,
                returns nothing, or takes no arguments although an argument is passed; a model has
                no arrays; `optimizer` is not an optimizer.

        Example:
            >>> f = lambda x: (gt.stop_gradient(x) ** 2).sum()
            >>> report = gt.why_zero(f, gt.asarray(np.float32([1.0, 2.0])))
            >>> bool(report), report.findings[0].kind
            (True, 'detached')
            >>> bool(gt.why_zero(lambda x: (x ** 2).sum(), gt.asarray(np.float32([1.0, 2.0]))))
            False

        Source: requested in jax#10867.
        """
        backend = self._backend
        framework = Framework(backend, "why_zero")
        is_model = framework.recorded_run.is_model(f)
        if args and callable(f) and _takes_nothing(f):
            raise GradtoolsError(
                f"why_zero: f takes no arguments, and {describe(backend, args[0])} was passed. "
                "Pass a function of this argument, or the trained model: why_zero(f, model=...)."
            )
        if args and optimizer is not None and model is None and not is_model:
            several = [args[i] for i in normalized_argnums("why_zero", argnums, len(args))]
            trained_ones = several[0] if len(several) == 1 else several
            if framework.training.are_parameters(f, trained_ones):
                model, f, args, kwargs = trained_ones, partial(f, *args, **kwargs), (), {}
        in_training = model is not None or optimizer is not None or is_model or not args
        looks_at_arguments = not in_training
        if is_model and model is None:
            leaves = [x for arg in args for x in backend.flatten(arg)[0]]
            looks_at_arguments |= any(backend.is_array(x) and backend.is_inexact(x) for x in leaves)
        parts: list[Diagnosis] = []
        if looks_at_arguments:
            program = LeafProgram(backend, "why_zero", f, args, kwargs, argnums).with_values()
            recording = recording_of(program)
            inputs, names = recording.graph.inputs, program.names
            examined = {names[k]: inputs[k : k + 1] for k in program.wrt}
            parts.append(diagnosed(program, recording, examined))
        if in_training:
            if not callable(f):
                raise GradtoolsError(
                    f"why_zero: f is {describe(backend, f)}; expected a function. Pass a closure "
                    "that computes the loss: why_zero(lambda: loss(model, batch), model=model)."
                )
            parts.append(trained(backend, f, args, kwargs, model, optimizer))
        findings = tuple(finding for part in parts for finding in part.findings)
        names = tuple(name for part in parts for name in part.names)
        notes = tuple((text, tuple(of)) for part in parts for text, of in part.notes)
        return GradientReport(findings, names, notes)


def _takes_nothing(f: Any) -> bool:
    """Returns whether the signature of f has no parameters."""
    try:
        return not signature(f).parameters
    except (TypeError, ValueError):  # a builtin may lack a signature
        return False
