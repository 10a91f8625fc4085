"""`measure`: the floating-point operations, peak bytes, saved bytes and seconds of a call.

Operations of the program are counted, not those of a machine. Both frameworks count by the same
formulas, so a function written once costs the same in both. The shared formulas (products,
convolutions, factorisations, complex arithmetic) are here; `torch/measures.py` and
`jax/measures.py` observe the operations of a call.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np

from gradtools.arguments.checks import check_function
from gradtools.backend import Operators, P
from gradtools.errors import GradtoolsError
from gradtools.printing import table
from gradtools.seeing.frameworks import Framework

_RUNS, _ENOUGH = (3, 25), 1.0  # at least, at most; seconds after which no further run starts


@dataclass(frozen=True)
class Measurement:
    """The cost of one call; `str()` prints it, `to_json()` serializes it.

    Attributes:
        flops: Floating-point operations.
        peak_bytes: The most bytes alive at once among the arrays that the call made.
        saved_bytes: The bytes kept for the backward pass; None if f cannot be differentiated,
            which `notes` then explains.
        seconds: The median of `runs` runs.
        fastest: The quickest run.
        slowest: The slowest run.
        runs: The number of timed runs, after one warm-up run.
        backend: "torch" or "jax".
        device_peak_bytes: The peak that the accelerator's allocator reports, if it does.
        notes: What these numbers do not include.
    """

    flops: int
    peak_bytes: int
    saved_bytes: int | None
    seconds: float
    fastest: float
    slowest: float
    runs: int
    backend: str
    device_peak_bytes: int | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return table(list(self._rows()), self.notes)

    def text(self, colour: bool = False) -> str:
        """The record as text; `colour` adds a terminal's escape codes."""
        bold, end = ("\033[1m", "\033[0m") if colour else ("", "")
        lines = [f"{bold}{name:<11}{end}  {value}" for name, value in self._rows()]
        return "\n".join([*lines, *[f"note: {note}" for note in self.notes]])

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "flops", scaled(self.flops, "FLOP")
        yield "peak bytes", scaled(self.peak_bytes, "B")
        if self.device_peak_bytes is not None:
            yield "device peak", scaled(self.device_peak_bytes, "B")
        saved = self.saved_bytes
        yield "saved bytes", "unknown" if saved is None else scaled(saved, "B")
        spread = f"median of {self.runs}, {_time(self.fastest)} to {_time(self.slowest)}"
        yield "seconds", f"{_time(self.seconds)} ({spread})"

    def to_dict(self) -> dict[str, Any]:
        """The attributes as JSON data."""
        return {**asdict(self), "notes": list(self.notes)}

    def to_json(self) -> str:
        """The attributes as a JSON object."""
        return json.dumps(self.to_dict(), indent=2)


def scaled(number: float, unit: str) -> str:
    """A number with three digits and a decimal prefix, such as "1.5 GFLOP"."""
    prefixes = ["", "k", "M", "G", "T", "P"]
    while abs(number) >= 999.5 and len(prefixes) > 1:
        number /= 1000
        prefixes.pop(0)
    return f"{number:.3g} {prefixes[0]}{unit}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


class Measures(Operators):
    """The operator `measure`, bound to one backend."""

    def measure(self, f: Callable[P, Any], *args: Any, **kwargs: Any) -> Measurement:
        """Measures what the call ``f(*args, **kwargs)`` costs.

        The call is measured as it is: for a loss its value, for ``gt.grad(loss)`` the gradient with
        its backward pass. State that f or an optimizer can reach is restored afterwards.

        - ``flops``: arithmetic on floating and complex arrays. One for each element that an
          elementwise operation gives, exp or tanh included; n - 1 for a sum or a maximum over n;
          2mnk for a product of matrices; for a convolution two for each pair of a weight and an
          element that meet, the padding not counted; a whole power as its multiplications. A
          complex multiplication is 6, an addition 2. Comparisons, selections, casts, copies,
          integers and random bits are none. Loops count times their trips, a branch if it runs.
          A bridged function (`gradtools.bridge`) is counted by its own framework, for its shapes.
          What cannot be counted (a host function, a kernel of unknown content) is named in `notes`.
        - ``peak_bytes``: the most bytes alive at once of what the call made. Its results count;
          arguments, parameters and other arrays that existed before do not.
        - ``saved_bytes``: the bytes kept for the backward pass when f is differentiated along all
          its floating and complex arguments, each array once. What was there before the call is
          alive anyway and does not count. Of a gradient function it is what its own derivative,
          the second one, would keep.
        - ``seconds``: the median of 3 to 25 runs after one that does not count; nothing else is
          measured meanwhile.

        PyTorch: f runs several times, each time from the same random generators, optimizers, and
        buffers, parameters and `.grad` that f or an optimizer holds; the `.grad` of other leaves
        (those of a graph that was built before) is not restored. Bytes are counted by storage, so
        views share; what autograd keeps for tensors that require grad belongs to the peak.
        Operations and bytes are those of eager execution, also underneath `torch.compile`; seconds
        are those of f as it is.
        On CUDA `device_peak_bytes` is the peak of the allocator, whose statistics are reset.

        JAX: the call is measured as `jax.jit` compiles it, the arguments' arrays traced and all
        else constant. Operations are counted in its jaxpr without what no result needs, and as
        written: what XLA then merges or simplifies is counted all the same. ``peak_bytes`` is XLA's
        temporary plus output bytes, after its fusions; where it leaves a part to a library's
        kernel, a note says that its memory is not in it. Loops of unknown length are run once to
        count their trips. ``saved_bytes`` is what `jax.vjp` keeps.

        Args:
            f: Takes and returns pytrees of arrays.
            *args: Arguments of f; arrays of any shape and dtype, and anything else.
            **kwargs: Keyword arguments of f.

        Returns:
            A `Measurement`.

        Raises:
            GradtoolsError: f is no function; JAX: f cannot be traced; measure is called inside of
                a transform. What f raises comes through.

        Example:
            >>> w, x = gt.asarray(np.ones((4, 3), np.float32)), gt.asarray(np.ones(3, np.float32))
            >>> cost = gt.measure(lambda w, x: gt.xp.exp(w @ x), w, x)  # 2 * 4 * 3, and 4 exp
            >>> cost.flops, cost.saved_bytes
            (28, 16)

        Source: operation counts as in Griewank and Walther, Evaluating derivatives, 2008; saved
        tensors counted as PyTorch's saved_tensors_hooks and jax.vjp hold them.
        """
        check_function("measure", f, curried=False)
        return Framework(self._backend, "measure").measures.measure(f, args, kwargs)


# --- time --------------------------------------------------------------------------------


def timed(run: Callable[[], Any], between: Callable[[], Any] = lambda: None) -> list[float]:
    """The seconds of several runs; `between` runs after each and is not timed."""
    times: list[float] = []
    while len(times) < _RUNS[0] or (len(times) < _RUNS[1] and sum(times) < _ENOUGH):
        start = perf_counter()
        result = run()
        times.append(perf_counter() - start)
        del result
        between()
    return times


def check_outside(is_traced: bool) -> None:
    """Raises if the arrays of a call are tracers of a running transform."""
    if is_traced:
        raise GradtoolsError(
            "measure: called inside of a transform, where arrays have no values. Call it "
            "outside, on the transformed function."
        )


def without_saved(error: Exception) -> tuple[None, list[str]]:
    """The bytes that f saves, unknown as it cannot be differentiated, and the note that says so."""
    first = str(error).strip().partition("\n")[0]
    return None, [f"saved bytes are unknown, f cannot be differentiated: {first}"]


def measurement(
    times: Sequence[float], unknown: Iterable[str] = (), notes: Sequence[str] = (), **others: Any
) -> Measurement:
    """The `Measurement` of these times and `others`; no rule counts the `unknown` operations."""
    names = ", ".join(sorted(set(unknown)))
    not_counted = [f"not in flops: {names}, which no rule counts"] if names else []
    return Measurement(
        seconds=statistics.median(times),
        fastest=min(times),
        slowest=max(times),
        runs=len(times),
        notes=(*not_counted, *notes),
        **others,
    )


# --- what operations cost ----------------------------------------------------------------

# Real operations per complex operation.
_COMPLEX = {"add": 2, "sub": 2, "neg": 2, "mul": 6, "square": 6, "sum": 2, "prod": 6, "div": 11}


def weight(kind: str, is_complex: bool) -> int:
    """The real operations of one elementary operation."""
    return _COMPLEX.get(kind, 1) if is_complex else 1


def product(elements: int, contracted: int, is_complex: bool) -> int:
    """The cost of a matrix product with this many elements, each a sum of `contracted` terms."""
    return elements * contracted * (8 if is_complex else 2)


def whole_power(exponent: int, is_complex: bool) -> int:
    """The cost of x**n by repeated squaring, with a division for negative n."""
    n = abs(exponent)
    times = n.bit_length() - 1 + n.bit_count() - 1 if n > 1 else 0
    divisions = weight("div", is_complex) if exponent < 0 else 0
    return times * weight("mul", is_complex) + divisions


def meetings(
    outs: int, taps: int, ins: int, stride: int, low: int, in_step: int = 1, tap_step: int = 1
) -> int:
    """The number of (tap, element) pairs along one axis of a convolution, padding not counted.

    Args:
        outs: The length of the result.
        taps: The length of the kernel.
        ins: The length of the input.
        stride: The stride of the windows.
        low: Padding before the first element.
        in_step: Dilation of the input.
        tap_step: Dilation of the kernel.
    """
    few, many = sorted([(outs, stride), (taps, tap_step)])
    steps = np.arange(many[0]) * many[1] - low
    last = (ins - 1) * in_step
    total = 0
    for k in range(few[0]):
        at = steps + k * few[1]
        total += int(np.count_nonzero((at >= 0) & (at <= last) & (at % in_step == 0)))
    return total


def convolution(meeting: Sequence[int], batch: int, ins: int, outs: int, is_complex: bool) -> int:
    """The cost of a convolution, from `meetings` along each axis and the channels of a group."""
    return product(math.prod(meeting) * batch * outs, ins, is_complex)


def fourier_flops(elements: int, length: int, real: bool) -> int:
    """The cost of FFTs of this length over all elements, 5 n log2 n each."""
    return round(elements * math.log2(max(length, 1)) * (2.5 if real else 5))


def cholesky(shape: Sequence[int]) -> int:
    """The cost of the Cholesky factors of matrices, stacked in an array of this shape."""
    return math.prod(shape[:-2]) * (shape[-1] ** 3 // 3)


def lu(shape: Sequence[int]) -> int:
    """The cost of the LU factors of matrices, stacked in an array of this shape."""
    return math.prod(shape[:-2]) * (2 * shape[-1] ** 3 // 3)


def triangular_solve(shape: Sequence[int], elements: int) -> int:
    """The cost of solving with triangular matrices of this shape for so many unknowns in all."""
    return shape[-1] * elements


def attention(rows: int, keys: int, width: int, out_width: int) -> int:
    """The cost of scaled dot-product attention: scores, softmax, products with the values."""
    return rows * (2 * keys * (width + out_width) + 6 * keys - 2)
