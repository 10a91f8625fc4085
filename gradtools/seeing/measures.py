"""What a call costs: floating-point operations, bytes alive, bytes kept for backward, seconds.

The counts are those of the program, not of a machine: an operation is counted by one table of
rules in both frameworks, so that a function written once costs the same in both. What a rule
needs that is not a framework's own stands here: products, convolutions, factorisations, and what
a complex number costs. How the operations of a call are seen is the wings' (`measures.py`).
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

from gradtools import notebook_html
from gradtools.arguments.wording import with_article
from gradtools.backend import Operators, P
from gradtools.errors import GradtoolsError
from gradtools.seeing.frameworks import Framework

_RUNS, _ENOUGH = (3, 25), 1.0  # at least, at most; seconds after which no further run starts


@dataclass(frozen=True)
class Measurement:
    """What one call costs. `str()` shows it, `to_json()` writes it.

    Attributes:
        flops: Floating-point operations.
        peak_bytes: The most bytes alive at once of what the call made.
        saved_bytes: The bytes kept for the backward pass; None if f cannot be differentiated,
            which `notes` then explains.
        seconds: The median of `runs` runs.
        fastest: The quickest run.
        slowest: The slowest run.
        runs: How many runs were timed, after one that was not.
        backend: "torch" or "jax".
        device_peak_bytes: What the accelerator's own allocator says the peak is, where it does.
        notes: What is not in these numbers, in plain words.
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
        return notebook_html.table(list(self._rows()), self.notes)

    def text(self, colour: bool = False) -> str:
        """The record in a few lines, with a terminal's colours if asked for."""
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
        """The attributes, as JSON knows them."""
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
    """The operator that says what a call costs."""

    def measure(self, f: Callable[P, Any], *args: Any, **kwargs: Any) -> Measurement:
        """Measures what the call ``f(*args, **kwargs)`` costs.

        The call is measured as it is: for a loss its value, for ``gt.grad(loss)`` the gradient with
        its backward pass. Everything is restored afterwards.

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

        PyTorch: f runs several times, each time from the same random generators, buffers,
        parameters, `.grad` and optimizers. Bytes are counted by storage, so views share; what
        autograd keeps for tensors that require grad belongs to the peak. Operations and bytes are
        those of eager execution, also underneath `torch.compile`; seconds are those of f as it is.
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
        if not callable(f):
            raise GradtoolsError(
                f"measure: f is {with_article(type(f).__name__)}; expected a function."
            )
        return Framework(self._backend, "measure").measures.measure(f, args, kwargs)


# --- time --------------------------------------------------------------------------------


def timed(run: Callable[[], Any], between: Callable[[], Any] = lambda: None) -> list[float]:
    """The seconds of several runs; `between` is called after each, on nobody's clock."""
    times: list[float] = []
    while len(times) < _RUNS[0] or (len(times) < _RUNS[1] and sum(times) < _ENOUGH):
        start = perf_counter()
        result = run()
        times.append(perf_counter() - start)
        del result
        between()
    return times


def measurement(times: Sequence[float], **others: Any) -> Measurement:
    """The record of these times and all else."""
    return Measurement(
        seconds=statistics.median(times),
        fastest=min(times),
        slowest=max(times),
        runs=len(times),
        **others,
    )


def not_counted(names: Iterable[str]) -> list[str]:
    """The note about operations that no rule counts."""
    known = sorted(set(names))
    return [f"not in flops: {', '.join(known)}, which no rule counts"] if known else []


# --- what operations cost ----------------------------------------------------------------

# Of a complex number; of others an operation costs one.
_COMPLEX = {"add": 2, "sub": 2, "neg": 2, "mul": 6, "square": 6, "sum": 2, "prod": 6, "div": 11}


def weight(kind: str, is_complex: bool) -> int:
    """What one elementary operation costs."""
    return _COMPLEX.get(kind, 1) if is_complex else 1


def product(elements: int, contracted: int, is_complex: bool) -> int:
    """A product of matrices: so many elements, each a sum over so many terms."""
    return elements * contracted * (8 if is_complex else 2)


def whole_power(exponent: int, is_complex: bool) -> int:
    """Multiplications of x**n by squaring, and a division where n is negative."""
    n = abs(exponent)
    times = n.bit_length() - 1 + n.bit_count() - 1 if n > 1 else 0
    divisions = weight("div", is_complex) if exponent < 0 else 0
    return times * weight("mul", is_complex) + divisions


def meetings(
    outs: int, taps: int, ins: int, stride: int, low: int, in_step: int = 1, tap_step: int = 1
) -> int:
    """Along one axis of a convolution: how often a tap meets an element that is not padding.

    Args:
        outs: Positions of the result.
        taps: Positions of the kernel.
        ins: Elements of the input.
        stride: Between the windows of neighbouring results.
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
    """Meetings along each axis, examples, input channels of a group, output channels."""
    return product(math.prod(meeting) * batch * outs, ins, is_complex)


def fourier_flops(elements: int, length: int, real: bool) -> int:
    """Fast transforms of this length over so many elements, the usual 5 n log2 n each."""
    return round(elements * math.log2(max(length, 1)) * (2.5 if real else 5))


def cholesky(n: int) -> int:
    """The factor of an n by n matrix."""
    return n**3 // 3


def triangular_solve(n: int, columns: int) -> int:
    """n unknowns, so many right-hand sides."""
    return n * n * columns


def lu(n: int) -> int:
    """The factors of an n by n matrix."""
    return 2 * n**3 // 3


def attention(rows: int, keys: int, width: int, out_width: int) -> int:
    """So many rows of scores over the keys: scaled products, softmax, products with the values."""
    return rows * (2 * keys * (width + out_width) + 6 * keys - 2)
