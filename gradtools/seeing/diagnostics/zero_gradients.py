"""The public operators `dependence`, `why_zero` and `guard_gradients`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from gradtools.arguments.checks import check_function
from gradtools.backend import Operators, P, R
from gradtools.boundary import like_function
from gradtools.errors import GradtoolsError, warn
from gradtools.seeing.diagnostics.diagnosis import (
    apart,
    briefly,
    diagnosed,
    differentiated,
    of_arguments,
    recording_of,
)
from gradtools.seeing.diagnostics.findings import Finding
from gradtools.seeing.diagnostics.report import (
    DependenceTable,
    GradientReport,
    by_weight,
    lines_of_lost,
)
from gradtools.seeing.diagnostics.training import Loop, after_backward, trained
from gradtools.seeing.frameworks import Framework
from gradtools.seeing.graphs.derivative_flow import dependence_matrix
from gradtools.seeing.graphs.program import LeafProgram


class SeeingOperators(Operators):
    """The operators that diagnose gradients, bound to one backend."""

    def dependence(self, f: Callable[P, Any], *args: Any, **kwargs: Any) -> DependenceTable:
        """How each output leaf of f depends on each input leaf.

        - ``differentiable``: a derivative flows; it may be zero at these arguments.
        - ``zero_derivative``: connected, by round, floor or sign: the derivative is zero
          everywhere.
        - ``cut``: data flows, no derivative does: detached, compared, cast to an integer, outside
          of the framework.
        - ``none``: no data flows.

        A path is as strong as its weakest step; of several paths the strongest counts. In JAX f is
        traced and no number is computed. In PyTorch f runs, because fake tensors would stay in
        whatever f caches; its effects are undone.

        Args:
            f: Takes and returns pytrees of arrays.
            *args: Arguments of f; arrays of any shape and dtype.
            **kwargs: Keyword arguments of f.

        Returns:
            A `DependenceTable`: ``table["output", "argument 0['w']"]`` is a `Dependence`, and
            ``str(table)`` shows all.

        Raises:
            GradtoolsError: f raises, returns no array, or the framework refuses something on the
                way that leaves it; `why_zero` then says where.

        Example:
            >>> f = lambda x, y: gt.xp.round(x) + gt.stop_gradient(y)
            >>> print(gt.dependence(f, gt.asarray(np.float32(1.5)), gt.asarray(np.float32(2.0))))
                        output
            argument 0  zero_derivative
            argument 1  cut

        Source: data-flow analysis over the recorded program; requested in jax#10867.
        """
        program = LeafProgram(self._backend, "dependence", f, args, kwargs)
        recording = recording_of(program)
        if recording.refusal is not None:
            refusal = recording.refusal
            raise GradtoolsError(
                f"dependence: {refusal.message} ({refusal.operation} at {refusal.source}). "
                "Ask why_zero, which says what to write instead."
            )
        matrix = tuple(map(tuple, dependence_matrix(recording.graph)))
        return DependenceTable(tuple(program.out_names), tuple(program.names), matrix)

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

        f runs once under observation. Where data flows to the output and the derivative does not,
        the line, the operation, the kind of loss and the fix are reported; so are single terms of a
        sum that are lost. If the argument is connected and its gradient is zero, NaN or infinite at
        these values, the report names the operations at which this happens (multiplied by zero,
        dead, saturated, underflow, ``nan``) and what to write there. What f changes is restored.

        Masks, indices and branches that a comparison chooses do not count as lost gradients;
        neither does a stopped value that only scales.

        In training pass the model as `model` (or as f), or a closure without arguments that
        computes the loss. Then the parameters are examined instead of the arguments: those that the
        loss does not read or whose gradient is lost, those that the optimizer does not hold, what
        it holds of another model, and tensors in a plain list or that require grad without being a
        parameter. What may be intended (frozen parameters, buffers that the loss depends on) is in
        the report's notes. In PyTorch f may also be the loss itself, after `loss.backward()`.

        Args:
            f: Takes and returns pytrees of arrays; a module, or a closure without arguments. With
                `model`, in PyTorch, also a loss that was computed already.
            *args: Arguments of f.
            argnums: The position of the argument, or of several. Its leaves are floating or
                complex.
            model: The model that is trained, or a tuple or dict of models and arrays. In JAX the
                one that f captures, or a pytree of parameters.
            optimizer: PyTorch: an optimizer or a list of them. JAX: a transformation of optax, its
                state, the pair of both, or an `nnx.Optimizer`.
            **kwargs: Keyword arguments of f.

        Returns:
            A `GradientReport`, false when nothing is lost: ``.findings``, one for each leaf and
            cause, with ``argument``, ``kind``, ``source`` (``.file``, ``.line``, ``.function``)
            and ``fix``; ``str()`` to read, ``.to_json()`` to keep.

        Raises:
            GradtoolsError: argnums is out of range or names an integer argument; f raises for
                reasons of its own, or returns nothing; a model holds no arrays; `optimizer`
                is not an optimizer.

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
        is_model = Framework(backend, "why_zero").recorded_run.is_model(f)
        in_training = model is not None or optimizer is not None or is_model or not args
        looks_at_arguments = not in_training
        if is_model and model is None:
            leaves = [x for arg in args for x in backend.flatten(arg)[0]]
            looks_at_arguments |= any(backend.is_array(x) and backend.is_inexact(x) for x in leaves)
        findings, names, notes = list[Finding](), list[str](), list[tuple[str, list[str]]]()
        if looks_at_arguments:
            program = LeafProgram(backend, "why_zero", f, args, kwargs, argnums).with_values()
            recording = recording_of(program)
            findings = diagnosed(program, recording, of_arguments(program, recording))
            findings, notes = apart(findings, program.wrt_names())
            findings, names = [*by_weight(findings)], [program.names[k] for k in program.wrt]
        if in_training:
            loop = Loop(backend, "why_zero", f, args, kwargs, model, optimizer)
            is_spent = not callable(f) and backend.is_array(f)
            more = (after_backward if is_spent else trained)(loop)
            findings = [*by_weight((*findings, *more.findings))]
            names, notes = [*names, *more.names], [*notes, *more.notes]
        noted = tuple((text, tuple(of)) for text, of in notes)
        return GradientReport(tuple(findings), tuple(names), noted)

    def guard_gradients(
        self,
        f: Callable[P, R],
        argnums: int | tuple[int, ...] = 0,
        model: Any = None,
        optimizer: Any = None,
    ) -> Callable[P, R]:
        """The loss f; its first call warns of parameters that do not reach its output.

        Leaves that do not reach the output are named in one `GradtoolsWarning`, with the line at
        which each is lost. The first call runs f once more under observation, with its effects
        undone; later calls cost nothing.

        The checked leaves are, in PyTorch, every tensor that requires grad among the arguments and
        the parameters of the modules that f holds. Without such a tensor, and in JAX, they are the
        leaves of the arguments in argnums. Inside PyTorch's function transforms and in compiled
        code nothing can be observed, so the check waits for the first plain call. With a model or
        an optimizer, or if f takes no arguments, the checks of `why_zero` for training run
        instead, except for gradients that are zero at the given values.

        Args:
            f: A loss; takes and returns pytrees of arrays; a module, or a closure without
                arguments.
            argnums: The position of the argument that is differentiated, or of several.
            model: As in `why_zero`.
            optimizer: As in `why_zero`.

        Returns:
            A function of f's arguments, with f's results.

        Raises:
            GradtoolsError: argnums is out of range; (on the first call) f returns no array.

        Example:
            >>> import warnings
            >>> loss = gt.guard_gradients(lambda p: (p["w"] ** 2).sum())
            >>> p = {"w": gt.asarray(np.float32([3.0])), "b": gt.asarray(np.float32([1.0]))}
            >>> with warnings.catch_warnings(record=True) as caught:
            ...     warnings.simplefilter("always")
            ...     value = float(loss(p))
            >>> print(caught[0].message)
            guard_gradients: 1 of 2 leaves does not reach the output of f:
              argument 0['b']: unused

        Source: requested in jax#10867.
        """
        check_function("guard_gradients", f)
        options = argnums, model, optimizer
        return like_function("", f, partial(self._guarded, f, options, [True]))

    def _guarded(
        self, f: Any, options: Any, first: list[bool], /, *args: Any, **kwargs: Any
    ) -> Any:
        failed = None
        if first and Framework(self._backend, "guard_gradients").recorded_run.watchable():
            first.clear()
            try:
                self._warn_of_lost(f, args, kwargs, *options)
            except GradtoolsError as error:
                if error.__cause__ is None:
                    raise
                failed = error  # f raised under observation
        out = f(*args, **kwargs)  # where f raises, the error is f's own
        if failed is not None:
            warn(f"guard_gradients: nothing was checked. {failed}")
        return out

    def _warn_of_lost(
        self, f: Any, args: Any, kwargs: Any, argnums: Any, model: Any, optimizer: Any
    ) -> None:
        """Warns of lost gradients."""
        caller, backend = "guard_gradients", self._backend
        if model is not None or optimizer is not None or not args:
            diagnosis = trained(Loop(backend, caller, f, args, kwargs, model, optimizer), False)
            findings, known = diagnosis.findings, diagnosis.names
            noun, verbs, predicate = "parameters", ("is", "are"), "not trained"
        else:
            program = LeafProgram(backend, caller, f, args, kwargs, argnums, strict=False)
            recording = recording_of(program)
            examined = differentiated(program, recording)
            findings = diagnosed(program, recording, examined, values=False)
            known = [one.name for one in examined]
            noun, verbs, predicate = "leaves", ("does", "do"), "not reach the output of f"
        if lost := briefly(findings):
            lines = "\n".join(f"  {line}" for line in lines_of_lost(lost, known))
            warn(
                f"guard_gradients: {len(lost)} of {max(1, len(known))} {noun} "
                f"{verbs[len(lost) > 1]} {predicate}:\n{lines}"
            )
