"""Tests comparisons, skipped comparisons and side effects of `checked` in both frameworks."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from contextlib import nullcontext

import numpy as np
import pytest

from gradtools.cli import main
from gradtools.testing import CheckedReport, DerivativeError, checked

pytest_plugins = ["pytester"]
X = np.random.default_rng(0).standard_normal((4, 3))
TRACED = "traced values (jit, vmap, compile)"


def _wrong(gt):
    """Return a custom rule with a wrong bwd."""

    @gt.custom_rule
    def wrong(x):
        return x**3

    wrong.defvjp(lambda x: (x**3, x), lambda x, ct: (2 * ct * x**2,))
    return wrong


def test_what_agrees_is_counted(gt):
    x = gt.asarray(X)
    with checked() as report:
        gt.grad(lambda x: (x**3).sum())(x)
        gt.jvp(lambda x: x**2, (x,), (x,))
    assert (report.compared, dict(report.skipped), report.notes) == (2, {}, [])
    assert str(report) == "checked: 2 derivatives agree with finite differences"


def test_an_error_says_operator_argument_lines_and_both_numbers(gt):
    wrong = _wrong(gt)
    f = lambda p: (wrong(p["b"]) * p["a"]).sum()
    with pytest.raises(DerivativeError) as caught, checked():
        gt.value_and_grad(f)({"a": gt.asarray(X), "b": gt.asarray(X)})
    text = str(caught.value)
    assert text.startswith(
        "value_and_grad: the derivative with respect to argument 0['b'] is inconsistent"
    )
    numbers = [
        float(s.rstrip(".,"))
        for s in text.split()
        if s.rstrip(".,").count(".") == 1 and s[0] in "-0123456789"
    ]
    assert len(numbers) >= 2 and numbers[0] != numbers[1]
    assert "<locals>.<lambda> (test_checked.py:" in text
    assert "differentiated at test_checked.py:" in text
    assert re.search(
        r"The derivative of (the rule )?wrong \(.*\) is the first wrong derivative\.", text
    )
    assert isinstance(caught.value, AssertionError)


def test_outside_of_a_block_nothing_is_compared_or_replaced(gt):
    wrong, x, backend = _wrong(gt), gt.asarray(X), gt._api._backend
    before = dict(vars(backend))
    with checked():
        assert vars(backend)["vjp"] is not before.get("vjp")
        gt.grad(lambda x: (x**2).sum())(x)
    assert set(vars(backend)) >= set(before)
    assert all(vars(backend)[name] is member for name, member in before.items())
    assert "vjp" not in vars(backend)
    gt.grad(lambda x: wrong(x).sum())(x)


def test_traced_values_are_counted(gt):
    x = gt.asarray(X)
    with checked() as report:
        gt.vmap(gt.grad(lambda x: (x**2).sum()))(x)
    assert report.compared == 0
    assert report.skipped == {TRACED: 1}
    assert f"not compared: 1, {TRACED}" in str(report)


def test_the_rows_of_a_batch_are_compared_one_by_one(gt):
    x = gt.asarray(X[0])
    with checked() as report:
        for mode in ("forward", "reverse"):
            gt.jacobian(lambda x: x**3, mode=mode)(x)
        gt.per_example_grad(lambda w, x: (w * x**2).sum())(x, gt.asarray(X))
    # three tangents, one pullback and four examples were compared
    assert report.compared == 3 + 1 + 4
    assert not report.skipped


# --- a `checked` block leaves the same state as one plain call


def _random_streams(torch, gt, x, net):
    f = lambda x: (torch.nn.functional.dropout(x, 0.5) * x).sum() * np.random.rand()  # noqa: NPY002
    return [gt.grad(f)(x), torch.rand(3), torch.tensor(np.random.rand(3))]  # noqa: NPY002


def _buffers_of_an_argument(torch, gt, x, net):
    gt.grad(lambda net: net(x).square().sum())(net)
    return [*net.buffers()]


def _buffers_of_a_captured_module(torch, gt, x, net):
    gt.grad(lambda x: net(x).square().sum())(x)
    return [*net.buffers()]


def _buffers_of_a_chunked_module(torch, gt, x, net):
    gt.chunked(net, 2)(x).sum().backward()
    return [*net.buffers()]


def _a_penalty_on_a_modules_gradient(torch, gt, x, net):
    grads = gt.per_example_grad(lambda net, x: net[0](x).tanh().square().sum())(net, x)
    sum(g.square().sum() for g in grads.values()).backward()
    return [p.grad for p in net[0].parameters()]


@pytest.mark.filterwarnings("ignore:chunked")
@pytest.mark.parametrize(
    "run",
    [
        _random_streams,
        _buffers_of_an_argument,
        _buffers_of_a_captured_module,
        _buffers_of_a_chunked_module,
        _a_penalty_on_a_modules_gradient,
    ],
)
def test_all_is_as_after_one_plain_call(run):
    torch = pytest.importorskip("torch")
    import gradtools.torch as gt

    found, reports = [], []
    for context in (checked, lambda: nullcontext(CheckedReport())):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).double()
        with context() as report:
            found.append(run(torch, gt, torch.from_numpy(X), net))
        reports.append(report)
    assert reports[0].compared >= 1 and not reports[0].skipped
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_stopped_data_that_leaves_is_a_note():
    torch = pytest.importorskip("torch")
    import gradtools.torch as gt

    with checked() as report:
        gt.grad(lambda x: (x * x.detach().mean().item()).sum())(torch.from_numpy(X))
    assert report.compared == 1
    assert report.notes[0].startswith("a stopped value leaves PyTorch via item() (test_checked.py:")


PROGRAM = """
    import sys
    import numpy as np
    import gradtools.{backend} as gt

    @gt.custom_rule
    def cube(x):
        return x ** 3

    factor = float(sys.argv[1])
    cube.defvjp(lambda x: (x ** 3, x), lambda x, ct: (factor * ct * x ** 2,))
    print(gt.grad(lambda x: cube(x).sum())(gt.asarray(np.ones(2, np.float32))))
"""


def test_a_script_runs_in_it(gradtools_backend, tmp_path, capsys):
    script = tmp_path / "program.py"
    script.write_text(textwrap.dedent(PROGRAM.format(backend=gradtools_backend)))
    argv = list(sys.argv)
    assert main(["checked", str(script), "3"]) == 0
    said = capsys.readouterr()
    assert "3." in said.out
    assert said.err == "checked: 1 derivatives agree with finite differences\n"
    assert main(["checked", str(tmp_path / "absent.py")]) == 2
    assert "absent.py: no such file" in capsys.readouterr().err
    assert main(["checked", str(script), "2"]) == 1
    assert "gradtools checked: grad: the derivative" in capsys.readouterr().err
    assert sys.argv == argv


def test_each_test_runs_in_it(pytester):
    pytester.makepyfile(
        """
        import numpy as np

        def test_of_a_rule(gt):
            rule = gt.custom_rule(lambda x: x ** 2)
            rule.defvjp(lambda x: (x ** 2, x), lambda x, ct: (ct * x,))
            gt.grad(lambda x: rule(x).sum())(gt.asarray(np.ones(2)))
        """
    )
    options = ("-p", "gradtools.testing.plugin", "-p", "no:cacheprovider")
    plain = pytester.runpytest_inprocess(*options)
    plain.assert_outcomes(passed=plain.parseoutcomes().get("passed", 0))
    result = pytester.runpytest_inprocess(*options, "--gradtools-checked")
    result.assert_outcomes(failed=plain.parseoutcomes()["passed"])
    result.stdout.fnmatch_lines(["*DerivativeError: grad: the derivative with respect to*"])


@pytest.mark.slow_at("torch")
def test_no_framework_is_imported_by_it_and_one_imported_inside_is_hooked(gradtools_backend):
    program = f"""
        import sys
        from gradtools.testing import checked, DerivativeError

        assert not {{"torch", "jax"}} & set(sys.modules)
        with checked() as report:
            assert not {{"torch", "jax"}} & set(sys.modules)
            import gradtools.{gradtools_backend} as gt
            import numpy as np

            gt.grad(lambda x: (x ** 2).sum())(gt.asarray(np.ones(2, np.float32)))
        assert report.compared == 1, report
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)
