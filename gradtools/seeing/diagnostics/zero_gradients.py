"""The public operator `why_zero`."""

from __future__ import annotations

from typing import Any

from gradtools.backend import Operators
from gradtools.seeing.diagnostics.diagnosis import apart, diagnosed, of_arguments, recording_of
from gradtools.seeing.diagnostics.findings import Finding
from gradtools.seeing.diagnostics.report import GradientReport, by_weight
from gradtools.seeing.diagnostics.training import Loop, after_backward, trained
from gradtools.seeing.frameworks import Framework
from gradtools.seeing.graphs.program import LeafProgram


class SeeingOperators(Operators):
    """The operators that diagnose gradients, bound to one backend."""

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
        dead, underflow, ``nan``) and what to write there. What f changes is restored.

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
            findings, notes = apart(findings)
            findings, names = [*by_weight(findings)], [program.names[k] for k in program.wrt]
        if in_training:
            loop = Loop(backend, "why_zero", f, args, kwargs, model, optimizer)
            is_spent = not callable(f) and backend.is_array(f)
            more = (after_backward if is_spent else trained)(loop)
            findings = [*by_weight((*findings, *more.findings))]
            names, notes = [*names, *more.names], [*notes, *more.notes]
        noted = tuple((text, tuple(of)) for text, of in notes)
        return GradientReport(tuple(findings), tuple(names), noted)
