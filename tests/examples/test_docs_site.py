"""The site has reference entries for all public names, lists the examples, and has no dead links.

`make docs`, which .ci/run calls, builds the whole site. These tests build a small site in a
temporary folder if MkDocs is installed.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

import gradtools
import gradtools.testing
from gradtools import cli
from gradtools.seeing.diagnostics.findings import KINDS
from tests.support.pages import ROOT

CONTENTS = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
REFERENCE = {
    found[1]
    for page in (ROOT / "docs" / "reference").glob("*.md")
    for found in re.finditer(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE)
}
needs_mkdocs = pytest.mark.skipif(not find_spec("mkdocs"), reason="MkDocs is not installed")


def test_every_public_name_is_in_the_reference(gt):
    shown = {path.rpartition(".")[2] for path in REFERENCE if path.startswith("gradtools.torch.")}
    assert shown == set(gt.__all__) - {"xp"}  # xp is the framework's own namespace
    assert "`gt.xp`" in (ROOT / "docs" / "reference" / "models.md").read_text(encoding="utf-8")


@pytest.mark.slow_at("gradtools")
@pytest.mark.parametrize("module", [gradtools, gradtools.testing])
def test_every_name_of_the_neutral_modules_is_in_the_reference(module):
    assert {f"{module.__name__}.{name}" for name in module.__all__} <= REFERENCE


def test_every_command_is_in_the_reference(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    commands = re.findall(r"^    ([a-z][\w-]+)(?: |$)", capsys.readouterr().out, re.MULTILINE)
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text(encoding="utf-8")
    assert re.findall(r"^::: \$ gradtools (.+)$", page, re.MULTILINE) == commands
    assert len(commands) >= 6


def test_every_page_example_and_notebook_is_in_the_contents():
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    programs = [*(ROOT / "examples").glob("[uc][0-9r]*.py")]
    programs += (ROOT / "examples" / "notebooks").glob("*.ipynb")
    places = [path.relative_to(ROOT).with_suffix(".md") for path in programs]
    listed = set(re.findall(r"[\w./-]+\.md", CONTENTS.partition("\nnav:")[2]))
    assert {path.as_posix() for path in (*pages, *places)} <= listed


def test_the_figures_of_the_pages_are_those_of_the_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    figures = importlib.import_module("figures")
    for page in figures.PAGES:
        _, now, _ = figures.parts(page.read_text(encoding="utf-8"))
        assert now == figures.table(page), "python benchmarks/figures.py"


def hook(name: str, monkeypatch):
    """Import a hook module with its folder on `sys.path`, as MkDocs does."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module(name)


# --- a small site ------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path):
    """Return a function that builds a site of one page with the project's hooks and settings."""
    (tmp_path / "docs").mkdir()
    for name in ("site_pages.py", "docstrings.py"):
        shutil.copy(ROOT / "docs" / name, tmp_path / "docs" / name)
    shutil.copytree(ROOT / "docs" / "assets", tmp_path / "docs" / "assets")
    settings = CONTENTS.partition("\nnav:")[0]
    (tmp_path / "mkdocs.yml").write_text(settings, encoding="utf-8")

    def build(readme: str) -> tuple[int, str]:
        (tmp_path / "README.md").write_text(readme, encoding="utf-8")
        ran = subprocess.run(
            [sys.executable, "-m", "mkdocs", "build"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        return ran.returncode, ran.stderr + ran.stdout

    build.folder = tmp_path
    return build


@needs_mkdocs
def test_a_page_shows_the_files_that_it_links_to(site):
    (site.folder / "program.py").write_text('"""It adds."""\n\nprint(1 + 1)\n')
    status, said = site("# Home\n\nSee [it](program.py).\n\n```python\nx[0](y)\n```\n")
    assert status == 0, said
    assert 'href="program.html"' in (site.folder / "build/site/index.html").read_text()
    assert "It adds." in (site.folder / "build/site/program.html").read_text()


@needs_mkdocs
def test_what_is_dead_fails(site):
    status, said = site(
        "# Home\n\n[A page](absent.md), [a program](absent.py), [a part](#nowhere)\n"
    )
    assert status != 0
    assert all(f"'{target}'" in said for target in ("absent.md", "absent.py", "#nowhere")), said


@needs_mkdocs
@pytest.mark.parametrize("source", ["https://example.org/x", "//example.org/x", "http://x.org/x"])
@pytest.mark.parametrize(
    "tag", ["<img src='{}'>", '<script async src="{}">', '<link rel="stylesheet" href="{}">']
)
def test_what_is_loaded_from_another_host_fails(monkeypatch, tag, source):
    from mkdocs.exceptions import PluginError

    pages, page = (
        hook("site_pages", monkeypatch),
        SimpleNamespace(file=SimpleNamespace(src_uri="x.md")),
    )
    own = tag.format("assets/x")
    assert pages.on_post_page(own, page, None) == own
    with pytest.raises(PluginError, match=r"^x\.md loads from another host"):
        pages.on_post_page(tag.format(source), page, None)


@needs_mkdocs
def test_pages_of_examples_link_to_their_folder_and_notebooks_to_colab(monkeypatch):
    pages = hook("site_pages", monkeypatch)
    monkeypatch.setenv("REPO_URL", "https://github.com/a/gradtools/")
    monkeypatch.setenv("REPO_REF", "v0.1.0")
    origin, here = "examples/notebooks/x.ipynb", "examples/notebooks/x.md"
    assert pages.with_downloads("# X\n\nText\n", origin, here) == (
        "# X\n\n[Open in Colab](https://colab.research.google.com/github/a/gradtools/blob/v0.1.0/"
        "examples/notebooks/x.ipynb) | [Download all examples](../../examples.zip)\n\nText\n"
    )
    monkeypatch.delenv("REPO_URL")
    assert "Colab" not in pages.with_downloads("# X\n", origin, here)


@pytest.mark.slow
@needs_mkdocs
def test_a_downloaded_example_runs_alone(tmp_path, monkeypatch):
    packed = hook("site_pages", monkeypatch).examples_folder()
    zipfile.ZipFile(io.BytesIO(packed)).extractall(tmp_path)
    ran = subprocess.run(
        [sys.executable, "examples/u07_grad_or_accumulate.py", "--backend", "jax"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(gradtools.__file__).parents[1])},
    )
    assert ran.returncode == 0, ran.stderr


# --- docstrings --------------------------------------------------------------------------


def test_an_entry_has_the_signature_the_arguments_and_an_example(gt, monkeypatch):
    shown = hook("docstrings", monkeypatch).entry(f"{gt.__name__}.grad", [])
    assert "gt.grad(" in shown and "self" not in shown
    assert " = 'raise'" in shown
    assert "**Arguments**" in shown and "- `argnums`: " in shown and "```pycon\n>>> " in shown


def test_signs_of_markdown_in_a_docstring_mean_themselves(gt, monkeypatch):
    shown = hook("docstrings", monkeypatch).entry(f"{gt.__name__}.mixed_partial", [])
    assert "&lt;u, " in shown and "<u" not in re.sub(r"`[^`]*`", "", shown)


def test_every_kind_of_finding_is_in_the_reference(monkeypatch):
    page = (ROOT / "docs" / "reference" / "seeing.md").read_text(encoding="utf-8")
    shown = hook("docstrings", monkeypatch).on_page_markdown(page, None, None, None)
    assert all(f"| {name} | {kind.reason} | {kind.fix} |" in shown for name, kind in KINDS.items())


def test_a_command_is_shown_by_its_help(monkeypatch):
    shown = hook("docstrings", monkeypatch).command(["why-zero"])
    assert shown.startswith("## gradtools why-zero") and "usage: gradtools why-zero" in shown
