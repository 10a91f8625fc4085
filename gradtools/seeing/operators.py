"""The public operators that look at a gradient: `dependence`, `why_zero`, `guard_gradients`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from gradtools.backend import Operators, P, R
from gradtools.calls import like_function
from gradtools.errors import GradtoolsError, place_of, warn
from gradtools.seeing.doctor import diagnosed, differentiated, moved, unreached
from gradtools.seeing.flow import dependence_matrix
from gradtools.seeing.program import Program
from gradtools.seeing.recording import Recording
from gradtools.seeing.report import DependenceTable, Report


class Seeing(Operators):
    """The operators that say what differentiation does, bound to one backend."""

    def dependence(self, f: Callable[P, Any], *args: Any, **kwargs: Any) -> DependenceTable:
        """How each output leaf of f depends on each input leaf.

        - ``differentiable``: a derivative flows, whatever its value is at these arguments.
        - ``zero_derivative``: connected, by round, floor or sign: the derivative is zero
          everywhere.
        - ``cut``: data flows, no derivative does: detached, compared, cast to an integer, outside
          of the framework.
        - ``none``: no data flows.

        Along a path the weakest step counts, over several paths the strongest path. In JAX f is
        traced and no number is computed; in PyTorch f runs, since tensors without numbers would
        stay behind in whatever f caches, and its effects are undone.

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

        Source: data-flow analysis over the recorded program; asked for in jax#10867.
        """
        program = Program(self._backend, "dependence", f, args, kwargs)
        recording = self._recorded(program)
        if recording.refusal is not None:
            refusal = recording.refusal
            raise GradtoolsError(
                f"dependence: {refusal.message} ({refusal.operation} at {refusal.source}). "
                "Ask why_zero, which says what to write instead."
            )
        matrix = tuple(map(tuple, dependence_matrix(recording.graph)))
        return DependenceTable(tuple(program.out_names), tuple(program.names), matrix)

    def why_zero(
        self, f: Callable[P, Any], *args: Any, wrt: int | tuple[int, ...] = 0, **kwargs: Any
    ) -> Report:
        """Every place at which the gradient of f's output to an argument is lost.

        f runs once under observation. Where data flows on to the output and the derivative does
        not, the line, the operation, the kind of loss and the mend are reported; so are single
        terms of a sum that are lost while the others flow. If the argument is connected and its
        gradient is zero at these values, the operations are named at which it becomes zero
        (multiplied by zero, dead, saturated, underflow). What f changes is put back.

        Masks, indices and branches that a comparison chooses are no losses; nor is a stopped value
        that only scales. Effects that several runs of f would have are undone: random streams,
        buffers.

        Args:
            f: Takes and returns pytrees of arrays; a module, too.
            *args: Arguments of f, at which it is looked at.
            wrt: The position of the argument, or of several. Its leaves are floating or complex.
            **kwargs: Keyword arguments of f.

        Returns:
            A `Report`, false when nothing is lost: ``.findings`` with kind, line and mend each,
            ``str()`` to read, ``.to_json()`` to keep.

        Raises:
            GradtoolsError: wrt is out of range or names an integer argument; f raises for reasons
                of its own, or returns nothing.

        Example:
            >>> f = lambda x: (gt.stop_gradient(x) ** 2).sum()
            >>> report = gt.why_zero(f, gt.asarray(np.float32([1.0, 2.0])))
            >>> bool(report), report.findings[0].kind
            (True, 'detached')
            >>> bool(gt.why_zero(lambda x: (x ** 2).sum(), gt.asarray(np.float32([1.0, 2.0]))))
            False

        Source: asked for in jax#10867.
        """
        program = Program(self._backend, "why_zero", f, args, kwargs, wrt)
        recording = self._recorded(program)
        findings = diagnosed(self._backend, program, recording)
        lost = {finding.argument for finding in findings if finding.whole}
        asked = [k for k in program.wrt if program.names[k] in lost]
        tried = asked if recording.refusal is None else []
        found = moved(self._backend, program, tried)
        depends = {program.names[k]: found.get(k) for k in asked}
        return Report(tuple(findings), tuple(program.names[k] for k in program.wrt), depends)

    def guard_gradients(
        self, f: Callable[P, R], argnums: int | tuple[int, ...] = 0
    ) -> Callable[P, R]:
        """f, which on its first call checks that every differentiated leaf reaches its output.

        Leaves that do not are named in one `GradtoolsWarning`, with the line at which each is
        lost. That call runs f once more under observation, with its effects undone; all others
        cost nothing.

        What is differentiated: in PyTorch every tensor that requires grad, among the arguments
        and among the parameters of the modules that f holds; where there is none, and in JAX, the
        leaves of the arguments in argnums. Inside PyTorch's own function transforms and in
        compiled code nothing can be observed: the check waits for the first plain call.

        Args:
            f: A loss; takes and returns pytrees of arrays.
            argnums: The position of the argument that is differentiated, or of several.

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

        Source: asked for in jax#10867.
        """
        if not callable(f):
            raise GradtoolsError(f"guard_gradients: f is {f!r}; expected a function.")
        return like_function("", f, partial(self._guarded, f, argnums, [True]))

    def _guarded(
        self, f: Any, argnums: Any, first: list[bool], /, *args: Any, **kwargs: Any
    ) -> Any:
        failed = None
        if first and self._backend.watchable():
            first.clear()
            failed = self._guard(f, args, kwargs, argnums)
        out = f(*args, **kwargs)  # where f raises, the error is f's own
        if failed is not None:
            warn(f"guard_gradients: nothing was checked. {failed}")
        return out

    def _guard(self, f: Any, args: Any, kwargs: Any, argnums: Any) -> GradtoolsError | None:
        """Warns of what is lost. Returns why that is not known, if f raised where it was seen."""
        program = Program(
            self._backend, "guard_gradients", f, args, kwargs, argnums, "argnums", False
        )
        try:
            recording = self._recorded(program)
        except GradtoolsError as error:
            if error.__cause__ is None:
                raise
            return error
        lost = unreached(program, recording)
        if lost:
            count = max(1, len(differentiated(program, recording)))
            verb = "does" if len(lost) == 1 else "do"
            warn(
                f"guard_gradients: {len(lost)} of {count} leaves {verb} not reach the output of "
                "f:\n" + "\n".join(f"  {name}: {why}" for name, why in lost)
            )
        return None

    def _recorded(self, program: Program) -> Recording:
        try:
            return self._backend.record(program.run, program.leaves, program.names)
        except GradtoolsError:
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {str(error).strip().rstrip('.')}"
            raise GradtoolsError(
                f"{program.asked}: f raised {said}{place_of(error)}. It must run at the arguments "
                "at which it is looked at."
            ) from error
