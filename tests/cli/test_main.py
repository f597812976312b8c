"""The command line as a whole: exit codes, one clear line, and pipes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from graphsurgery import cli, errors
from graphsurgery.version import __version__

COMMAND = [sys.executable, "-m", "graphsurgery"]


def test_no_command(run):
    done = run()
    assert (done.code, done.out, done.err) == (2, "", "graphsurgery: Missing command. (see graphsurgery --help)\n")


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help(run, option):
    done = run(option)
    assert (done.code, done.err) == (0, "")
    for name, text in cli._COMMANDS.items():
        assert f"  {name} " in done.out
        assert text in done.out
    assert "Exit codes: 0 done; 1 a difference was found; 2 usage; 3" in " ".join(done.out.split())


@pytest.mark.parametrize("command", ["apply", "inspect", "verify", "passes"])
def test_help_of_each_command(run, command):
    done = run(command, "--help")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"Usage: graphsurgery {command} ")
    assert "TODO" not in done.out


def test_version(run):
    done = run("--version")
    assert (done.code, done.out, done.err) == (0, f"graphsurgery, version {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["aply"], "No such command 'aply'. Did you mean 'apply'? (see graphsurgery --help)"),
        (["--verbos"], "No such option"),
        (["apply"], "Missing argument 'IN'. (see graphsurgery apply --help)"),
        (["verify", "a.onnx"], "Missing argument 'B'. (see graphsurgery verify --help)"),
        (["inspect", "a.onnx", "--fiel", "x"], "No such option"),
        (["apply", "a.onnx", "--weights", "move"], "Invalid value for '--weights': 'move' is not one of "),
        (["inspect", "a.onnx", "b.onnx"], "Got unexpected extra argument"),
    ],
)
def test_usage(run, arguments, line):
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"graphsurgery: {line}")
    assert done.err.count("\n") == 1


def test_exit_codes_are_those_of_the_errors():
    codes = {getattr(errors, name): getattr(errors, name).exit_code for name in errors.__all__}
    assert codes == {
        errors.GraphSurgeryError: 70,
        errors.DifferenceError: 1,
        errors.UsageError: 2,
        errors.InputRefusedError: 3,
        errors.SaveError: 3,
        errors.NothingChangedError: 4,
        errors.CannotCheckError: 5,
        errors.InternalError: 70,
    }


def test_a_fault_of_our_own_is_one_line(run, llama, saboteur):
    done = run("apply", llama, "-p", "saboteur{how=crash}")
    assert (done.code, done.out) == (70, "")
    assert done.err == (
        "graphsurgery: internal error: RuntimeError: scalpel slipped. Run again with -vv and report the traceback.\n"
    )
    assert [path.name for path in llama.parent.iterdir()] == ["llama.onnx"]


@pytest.mark.parametrize("options", [["-vv"], ["-v", "-v"], ["-vvv"], ["-qvv"]])
def test_a_traceback_on_demand(run, llama, saboteur, options):
    done = run("apply", llama, "-p", "saboteur{how=crash}", *options)
    assert done.code == 70
    assert done.err.startswith("Traceback (most recent call last):\n")
    assert "scalpel\nslipped" in done.err
    assert done.last_line.startswith("graphsurgery: internal error: RuntimeError: scalpel slipped.")
    done = run("inspect", llama.with_name("gone.onnx"), "-vv")
    assert done.code == 3
    assert "graphsurgery.errors.InputRefusedError: " in done.err


def test_an_interruption(run, llama, saboteur):
    done = run("apply", llama, "-p", "saboteur{how=interrupt}")
    assert (done.code, done.out) == (130, "")
    # The first, empty line closes the terminal's ^C.
    assert done.err == "\ngraphsurgery: interrupted; nothing was changed.\n"
    assert [path.name for path in llama.parent.iterdir()] == ["llama.onnx"]


def _with_closed_reader(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run with a standard output that nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [*COMMAND, *map(str, arguments)], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
        )
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["passes", "--report", "json"], 0),
        (["verify", "LLAMA", "OTHER"], 1),
    ],
)
def test_a_reader_that_goes_away_is_no_error_and_hides_no_result(arguments, code, llama, fixtures_dir):
    names = {"LLAMA": llama, "OTHER": fixtures_dir / "llama_merged" / "model.onnx"}
    done = _with_closed_reader(*(names.get(item, item) for item in arguments))
    assert (done.returncode, done.stderr) == (code, "")


def test_a_real_process(llama, tmp_path):
    """Exit code, streams and no colour off a terminal, as a shell sees them."""
    environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS")}
    environment |= {"TERM": "xterm-256color", "COLUMNS": "40"}
    done = subprocess.run(
        [*COMMAND, "apply", llama, "-p", "prune-last-token{index=last}"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=tmp_path,
    )
    assert done.returncode == 0
    assert "\x1b" not in done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["pass", "site", "layer", "status", "what", "and", "why"]
    assert lines[1].startswith("prune-last-token  lm_head:logits  -      rewritten  ")
    assert lines[-1] == f"wrote {llama.with_name('llama.surgery.onnx')}"
    assert done.stderr.startswith("warning: index=last takes row S-1 of every batch row")
    failed = subprocess.run(
        [*COMMAND, "inspect", "gone.onnx"], capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )
    assert (failed.returncode, failed.stdout) == (3, "")
    assert failed.stderr == "graphsurgery: gone.onnx does not exist: check the path.\n"
