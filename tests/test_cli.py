"""The command line answers at once, in plain words, and with the right exit status."""

import subprocess
import sys

import pytest

import gradtools
from gradtools import cli


def run(*args: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "gradtools.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_help_imports_no_framework():
    program = (
        "import sys; from gradtools import cli\n"
        "try: cli.main(['demo', '--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert not {'torch', 'jax', 'matplotlib', 'sklearn'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--backend {both,torch,jax}" in done.stdout


def test_version_is_the_packages():
    done = run("--version")
    assert (done.returncode, done.stdout.strip()) == (0, f"gradtools {gradtools.__version__}")


def test_no_command_shows_the_help_and_is_wrong_usage():
    done = run()
    assert done.returncode == 2
    assert "demo" in done.stdout


@pytest.mark.parametrize("seeds", ["0", "-1", "many"])
def test_seeds_are_whole_and_positive(seeds, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", "--seeds", seeds])
    assert stop.value.code == 2
    assert "--seeds" in capsys.readouterr().err


def test_backends_lists_versions_of_what_is_installed(capsys):
    assert cli.main(["backends"]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    for name in gradtools.available_backends():
        assert lines[name].startswith(f"{name} {cli.version(name)}")


def test_backends_says_how_to_install_what_is_absent(capsys, monkeypatch):
    monkeypatch.setattr(gradtools, "available_backends", lambda: ("torch",))
    assert cli.main(["backends"]) == 0
    assert 'jax: not installed: pip install "gradtools[jax]"' in capsys.readouterr().out


def test_demo_without_its_packages_names_them_and_the_extra(capsys, monkeypatch):
    found = cli.find_spec
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "optax" else found(name))
    assert cli.main(["demo", "--backend", "jax"]) == 1
    message = capsys.readouterr().err
    assert "optax" in message
    assert 'pip install "gradtools[demo]"' in message
    assert "flax" not in message
