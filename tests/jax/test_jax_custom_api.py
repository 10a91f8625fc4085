"""The stand-ins by which JAX's own tests of custom_jvp and custom_vjp run on `custom_rule`.

JAX's file is not part of this project, so here are a few tests of the same form, some of which must
fail. What the benchmark printed of JAX's own is what the page says.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "benchmarks" / "jax_custom_api.py"
TESTS = """
import jax, jax.numpy as jnp, unittest
from functools import partial
from jax._src import test_util as jtu

class CustomJVPTest(jtu.JaxTestCase):
  def rule(self, factor, symbolic_zeros=False):
    f = jax.custom_jvp(lambda n, x: n * jnp.sin(x), nondiff_argnums=(0,))
    f.defjvp(lambda n, p, t: (f(n, *p), factor * n * t[0]), symbolic_zeros=symbolic_zeros)
    return f
  def test_value(self):
    self.assertAllClose(jax.grad(self.rule(5.0), 1)(2.0, 1.0), 10.0, check_dtypes=False)
  def test_array_apart(self):
    f = self.rule(5.0)
    self.assertAllClose(jax.grad(f, 1)(jnp.float32(3.0), 1.0), 15.0, check_dtypes=False)
  def test_symbolic(self):
    f = self.rule(5.0, True)
    self.assertAllClose(jax.grad(f, 1)(2.0, 1.0), 10.0, check_dtypes=False)
  def test_wrong_number(self):
    self.assertAllClose(jax.grad(self.rule(4.0), 1)(2.0, 1.0), 10.0, check_dtypes=False)
  def test_refused(self):
    with self.assertRaisesRegex(TypeError, "words that nobody says"):
      jax.custom_jvp(lambda x: x)(1.0)
  def test_not_refused(self):
    with self.assertRaisesRegex(TypeError, ""):
      self.rule(1.0)(2.0, 1.0)
  def test_other_words(self):
    with self.assertRaisesRegex(ValueError, "words that nobody says"):
      raise ValueError("others")
  def test_skipped(self):
    raise unittest.SkipTest("")
  def test_affine(self):
    f = jax.custom_jvp(jnp.sin)
    f.defjvp(lambda p, t: (jnp.sin(p[0]), 5.0))
    self.assertAllClose(jax.jvp(f, (1.0,), (1.0,))[1], 5.0, check_dtypes=False)

class CustomVJPTest(jtu.JaxTestCase):
  def rule(self):
    f = jax.custom_vjp(lambda n, z: n * z**2, nondiff_argnums=(0,))
    f.defvjp(lambda n, z: (n * z**2, z), lambda n, z, c: (n * 2 * z * c,))
    return f
  def test_complex(self):
    z = jnp.complex64(1 + 2j)
    ours = jax.vjp(partial(self.rule(), 3.0), z)[1](jnp.complex64(1 + 1j))
    plain = jax.vjp(lambda z: 3.0 * z**2, z)[1](jnp.complex64(1 + 1j))
    self.assertAllClose(ours, plain)
  def test_array_apart(self):
    self.assertAllClose(jax.grad(self.rule(), 1)(jnp.float32(3.0), 2.0), 12.0, check_dtypes=False)
"""
FIRST = {
    "CustomJVPTest": {
        "passed": ["value", "array_apart", "symbolic", "refused"],
        "skipped": ["skipped"],
        "failed": ["wrong_number", "not_refused", "other_words", "affine"],
    },
    "CustomVJPTest": {"passed": ["complex", "array_apart"]},
}


def _told(path, tmp_path):
    out = tmp_path / "told.json"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, str(PROGRAM), str(path), str(out)],
        env=environment,
        check=True,
        capture_output=True,
    )
    return json.loads(out.read_text())


@pytest.mark.slow
def test_what_passes_and_what_does_not(tmp_path):
    path = tmp_path / "custom_api_test.py"
    path.write_text(TESTS)
    found = _told(path, tmp_path)
    expected = {
        f"{kind}.test_{name}": outcome
        for kind, outcomes in FIRST.items()
        for outcome, names in outcomes.items()
        for name in names
    }
    kept = ("passed", "skipped")
    assert {n: o if o in kept else "failed" for n, o in found.items()} == expected


def _program():
    spec = importlib.util.spec_from_file_location("jax_custom_api", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_says_each_test_that_does_not_pass_with_its_reason():
    first = {"A.x": "passed", "A.y": "ValueError: no", "A.z": "skipped", "A.w": "no"}
    text = _program().table(first)
    assert "| 4 | 1 | 1 | 2 |" in text
    assert "| A.y | not known: ValueError: no |" in text


def test_the_page_says_what_the_benchmark_printed():
    printed = (ROOT / "benchmarks" / "results" / "jax_custom_api.md").read_text()
    row = re.search(r"^\| custom_api_test.py \|(.*)\|$", printed, re.MULTILINE)[1]
    every, skipped, passed, rest = map(int, row.split("|"))
    assert "not known" not in printed
    assert passed >= 120 and passed + skipped + rest == every
    page = " ".join((ROOT / "docs" / "migrating-rules.md").read_text().split())
    assert f"{every} tests, of which JAX skips {skipped}" in page
    assert f"{passed} of the {every - skipped} pass, and {rest} do not" in page


@pytest.mark.parametrize("name", _program().REASONS)
def test_each_reason_is_of_a_test_that_did_not_pass(name):
    printed = (ROOT / "benchmarks" / "results" / "jax_custom_api.md").read_text()
    assert f"| {name} |" in printed
