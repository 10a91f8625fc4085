"""Tests the supported versions in the package requirements and in the errors at import."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import gradtools
from gradtools.code_origin import PACKAGE, USER, kind_of
from gradtools.printing import printable
from gradtools.versions import SUPPORTED, check_version
from tests.support import versions

ROOT = Path(__file__).parents[2]
INSTALLED = gradtools.available_backends()


@pytest.mark.parametrize("package", SUPPORTED)
def test_the_extras_ask_for_the_versions_that_an_import_supports(package):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = extras["optional-dependencies"][package]
    oldest, too_new = SUPPORTED[package]
    assert f"{package}>={oldest},<{too_new}" in required


@pytest.mark.parametrize(
    ("package", "version"),
    [
        *(("torch", v) for v in ("2.8.0", "2.13.0+cpu", "2.15.0", "2.13.0a0+git1234")),
        *(("jax", v) for v in ("0.7.2", "0.10.2", "0.11.0", "0.12.0.1", "0.12.0.dev20261101")),
    ],
)
def test_a_supported_version_passes(package, version):
    check_version(package, version)


@pytest.mark.parametrize(
    ("package", "version"),
    [
        *(("torch", v) for v in ("1.13.1", "2.7.1", "2.100.0", "3.0", "unknown")),
        *(("jax", v) for v in ("0.6.2", "0.4.38", "0.13.0", "0.13.0.dev20261101", "1.0")),
    ],
)
def test_another_version_is_refused_in_a_sentence_that_names_the_range(package, version):
    oldest, too_new = SUPPORTED[package]
    range_and_version = re.escape(
        f"supports {package}>={oldest},<{too_new} and found {package} {version}"
    )
    with pytest.raises(ImportError, match=range_and_version):
        check_version(package, version)


def test_the_check_can_be_switched_off(monkeypatch):
    monkeypatch.setenv("GRADTOOLS_ANY_VERSION", "1")
    check_version("torch", "3.0")


@pytest.mark.slow_at("0.1.0", "torch")
@pytest.mark.parametrize("package", INSTALLED)
@pytest.mark.parametrize("version", ["0.1.0", "9.0.0"])
def test_an_import_with_another_version_is_refused_before_anything_else_is_read(package, version):
    program = f"""
import {package}
{package}.__version__ = {version!r}
for name in ("gradtools.{package}", "gradtools.{package}.arrays"):
    try:
        __import__(name)
    except ImportError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, encoding="utf-8", check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all(f"found {package} {version}" in line for line in lines)


def test_a_release_has_the_version_of_its_tag_no_relative_link_and_the_addresses():
    release = runpy.run_path(str(ROOT / ".ci" / "for_index.py"))
    address = "https://host.invalid/gradtools", "v0.1.0"
    before = (ROOT / "README.md").read_text(encoding="utf-8")
    after = release["absolute"](before, *address)
    targets = re.findall(r"\]\(([^)]+)\)", after)
    assert len(targets) == len(re.findall(r"\]\(", before)) > 10
    assert all(re.match(r"https?://|#", target) for target in targets)
    assert "](https://host.invalid/gradtools/blob/v0.1.0/docs/tour.md)" in after
    title, _, *badges = release["with_badges"](after, *address).splitlines()[:6]
    assert title == "# gradtools" and all(re.match(r"\[!\[\w+\]\(https", x) for x in badges)
    pyproject = release["with_urls"]((ROOT / "pyproject.toml").read_text(), *address)
    assert tomllib.loads(pyproject)["project"]["urls"]["Issues"] == f"{address[0]}/issues"
    lines = {
        "gradtools/__init__.py": '__version__ = "3.1.4rc1"',
        "CITATION.cff": "version: 3.1.4rc1",
    }
    for name, line in lines.items():
        text = release["with_version"]((ROOT / name).read_text(), "", "v3.1.4rc1")
        assert [each for each in text.splitlines() if "3.1.4rc1" in each] == [line]
    with pytest.raises(SystemExit, match="expected one such as"):
        release["with_version"]("", "", "nightly")


def test_the_table_of_versions_is_that_of_the_last_run():
    page = versions.PAGE.read_text(encoding="utf-8")
    assert page == versions.write_page(json.loads(versions.SEEN.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        (("home", "my-packages", "net.py"), USER),
        (("venv", "lib", "site-packages", "net.py"), PACKAGE),
        (("usr", "lib", "dist-packages", "net.py"), PACKAGE),
    ],
)
def test_only_installed_packages_are_libraries(path, kind):
    assert kind_of(os.sep + os.path.join(*path)) == kind


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_the_command_prints_on_a_terminal_that_lacks_characters(tmp_path, encoding):
    (tmp_path / "loss_of.py").write_text("def f(x):\n    return (x * x).sum()\n")
    command = [sys.executable, "-m", "gradtools", "formula", "loss_of:f", "--shapes", "2"]
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    done = subprocess.run(
        [*command, "--backend", INSTALLED[0]],
        capture_output=True,
        env={**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert b"x in R^i" in done.stdout


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("ascii", "x in R^i, ybar = d^2a_i * gamma, J^T, 3 x 4, <a, b>, sqrt(2)"),
        ("cp1252", "x in R^i, ybar = d²a_i · gamma, J^T, 3 × 4, <a, b>, sqrt(2)"),
        ("utf-8", "x ∈ ℝⁱ, ȳ = ∂²aᵢ · γ, Jᵀ, 3 × 4, ⟨a, b⟩, √(2)"),
    ],
)
def test_print_spells_what_a_terminal_lacks(monkeypatch, encoding, expected):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr(sys, "stdout", terminal)
    print(printable("x ∈ ℝⁱ, ȳ = ∂²aᵢ · γ, Jᵀ, 3 × 4, ⟨a, b⟩, √(2)"))
    terminal.flush()
    assert terminal.buffer.getvalue().decode(encoding).strip() == expected


@pytest.mark.parametrize("shown", ["formula", "gradient_graph", "why_zero"])
def test_what_is_printed_is_what_the_terminal_can_show(monkeypatch, gt, backend_name, shown):
    xp = import_module("torch" if backend_name == "torch" else "jax.numpy")
    result = getattr(gt, shown)(lambda x: (xp.exp(x) * x).sum(), xp.ones(3))
    terminal = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    print(result)
