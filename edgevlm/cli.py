"""The command line: ``edgevlm`` and its commands, and how every run of it ends."""

from __future__ import annotations

import io
import os
import signal
import sys
from contextlib import suppress
from typing import Annotated, NoReturn

import typer

from edgevlm.apps.commands.lazy import lazy_app
from edgevlm.apps.credentials import mask_argv, mask_credentials
from edgevlm.errors import UserError, reason

ClickException: type[Exception] = typer.BadParameter.__mro__[2]  # click's, or that of the click which typer brings along

COMMANDS = {  # in the order of --help
    "run": ("edgevlm.apps.commands.run:run", "Watch a stream and answer questions about it."),
    "watch": ("edgevlm.apps.commands.watch:watch", "Report when the answer to a question becomes yes."),
    "serve": ("edgevlm.apps.commands.serve:serve", "Serve cameras over HTTP, with a page."),
    "ask": ("edgevlm.apps.commands.ask:ask", "Ask a running server."),
    "digest": ("edgevlm.apps.commands.ask:digest", "Show what happened while you were away."),
    "journal": ("edgevlm.apps.commands.ask:journal", "Show what cameras have written down."),
    "forget": ("edgevlm.apps.commands.ask:forget", "Delete what was seen, from memory and disk."),
    "config": ("edgevlm.apps.commands.serve:config", "Check a server's configuration."),
    "plan": ("edgevlm.apps.commands.plan:plan", "Estimate memory and speed before building anything."),
    "models": ("edgevlm.apps.commands.plan:models", "List models, their memory and their speed here."),
    "export": ("edgevlm.apps.commands.bundles:export", "Turn a checkpoint into a bundle that edgevlm runs."),
    "build": ("edgevlm.apps.commands.bundles:build", "Build a bundle's TensorRT engines on this device."),
    "bundles": ("edgevlm.apps.commands.bundles:bundles", "List, share, verify and remove bundles."),
    "policies": ("edgevlm.apps.commands.policies:policies", "List the policies and their settings."),
    "calibrate": ("edgevlm.apps.commands.calibrate:calibrate", "Choose the best policy for a model."),
    "doctor": ("edgevlm.apps.commands.machine:doctor", "Check this machine and suggest fixes."),
    "cameras": ("edgevlm.apps.commands.machine:cameras", "List this machine's cameras."),
    "power": ("edgevlm.apps.commands.machine:power", "Show the power this machine draws."),
    "state": ("edgevlm.apps.commands.machine:state", "Inspect snapshots, or make a key for them."),
    "bench": ("edgevlm.bench.cli:app", "Measure speed, memory and accuracy."),
}
MODELS = ("plan", "models", "export", "build", "bundles", "policies", "calibrate")
WATCH = ("run", "watch", "serve", "ask", "digest", "journal", "forget", "config")
PANELS = {name: "Watch" if name in WATCH else "Models and policies" if name in MODELS else "This machine" for name in COMMANDS}

app = lazy_app(
    COMMANDS,
    PANELS,
    name="edgevlm",
    help="Watch a camera within a fixed memory budget and answer questions about what it saw.",
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "EDGEVLM"},
    epilog="Each option of a command can be set in the environment: EDGEVLM_RUN_MODEL is run's --model.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from edgevlm import __version__

        typer.echo(f"edgevlm {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", is_eager=True, callback=_print_version, allow_from_autoenv=False
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point: user errors print one line and exit with status 2."""
    mask_argv()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # under nohup SIGHUP is ignored, and stays so
            signal.signal(number, signal.default_int_handler)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # it was closed before the start
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a character that the terminal cannot show ends no run
    try:
        code = app(prog_name="edgevlm", standalone_mode=False)
        sys.stdout.flush()
    except UserError as error:
        _fail(mask_credentials(str(error)))
    except ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(str(error), err=True)
            sys.exit(2)
        _fail(mask_credentials(_usage(error)))
    except BrokenPipeError:
        _silence_stdout()
        sys.exit(0)
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):  # typer's own answer to a closed pipe is exit code 1
            raise
        _silence_stdout()
        sys.exit(0)
    except MemoryError:
        _fail("there is not enough memory; end other programs, or give a smaller --budget or --chunk")
    except OSError as error:
        _silence_stdout()
        _fail(f"{mask_credentials(str(error.filename or 'the output'))}: cannot be read or written ({error.strerror or error})")
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(line: str) -> NoReturn:
    if os.environ.get("EDGEVLM_DEBUG"):
        import traceback

        traceback.print_exc()
    typer.echo(f"edgevlm: {line}", err=True)
    sys.exit(2)


def _usage(error: Exception) -> str:
    """A usage error's own words in one line, and where to read on."""
    if isinstance(error, typer.BadParameter):
        error.message = reason(error.message)
    context, words = getattr(error, "ctx", None), " ".join(str(getattr(error, "format_message", error.__str__)()).split())
    return f"{words.rstrip('.')}; see {context.command_path if context else 'edgevlm'} --help"


def _silence_stdout() -> None:
    """Let what is still buffered go nowhere, so that the interpreter's own flush at exit does not fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
