"""The command line starts quickly and has clear messages and correct exit statuses."""

import subprocess
import sys

import pytest

import gradtools
from gradtools import GradtoolsError, cli, command_inputs
from gradtools.testing import check_command


def run(*args: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "gradtools", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_help_imports_no_framework():
    program = (
        "import sys; from gradtools import cli\n"
        "try: cli.main(['check', '--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert not {'torch', 'jax'} & set(sys.modules)"
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
    assert "cross-check" in done.stdout


COMMANDS = [
    *("backends", "check", "cross-check", "why-zero", "graph", "formula"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_commands_help_begins_with_a_sentence_and_ends_with_an_example(capsys, command):
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    _, sentence, *_, example = capsys.readouterr().out.rstrip().split("\n\n")
    assert sentence[0].isupper() and sentence.endswith(".")
    assert example.startswith(f"example:\n  gradtools {command}")


def test_a_pipe_that_is_closed_ends_quietly():
    command = [sys.executable, "-m", "gradtools", "backends"]
    done = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    done.stdout.close()
    assert (done.stderr.read(), done.wait(60)) == (b"", 141)


def test_a_seed_is_not_negative(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["formula", "a:b", "--shapes", "3", "--seed", "-1"])
    assert stop.value.code == 2
    assert "--seed: expected a nonnegative integer, got '-1'" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        cli.main(["formula", "a:b", "--shapes", "3", "--seed", "0", "--help"])
    assert stop.value.code == 0


def test_random_complex_arguments_have_both_parts():
    (z,) = command_inputs.arrays_given(None, "3:complex64", 0)
    assert z.dtype == "complex64"
    assert (z.real != 0).all()
    assert (z.imag != 0).all()


def test_a_module_that_cannot_be_imported_is_told(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("import no_such_module")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(GradtoolsError, match="cannot be imported: No module named 'no_such_mod"):
        command_inputs.named("broken:f")


@pytest.mark.parametrize("shapes", ["3:U5", "3y4", "3:float33"])
def test_shapes_that_cannot_be_drawn_are_told(shapes):
    with pytest.raises(GradtoolsError, match=f"^--shapes: '{shapes}' is not a shape"):
        command_inputs.arrays_given(None, shapes, 0)


def test_a_check_that_cannot_be_run_is_status_2(capsys, monkeypatch):
    def refuse(_):
        raise GradtoolsError("no such device")

    monkeypatch.setattr(check_command, "check", refuse)
    assert cli.main(["check"]) == 2
    assert capsys.readouterr().err == "gradtools check: no such device\n"


def test_backends_lists_versions_of_what_is_installed(capsys):
    assert cli.main(["backends"]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    for name in gradtools.available_backends():
        assert lines[name].startswith(f"{name} {cli.version(name)}")


def test_backends_says_how_to_install_what_is_absent(capsys, monkeypatch):
    monkeypatch.setattr(gradtools, "available_backends", lambda: ("torch",))
    assert cli.main(["backends"]) == 0
    assert 'jax: not installed: pip install "gradtools[jax]"' in capsys.readouterr().out
