"""Define the command line ``edgevlm``: its commands and its exit statuses."""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
import traceback
from typing import Annotated, NoReturn

import typer

from edgevlm.apps.commands.lazy import lazy_app
from edgevlm.apps.credentials import mask_argv, mask_credentials
from edgevlm.errors import NoThreads, UserError, is_fault, reason
from edgevlm.progress import guard_streams, note_stopped, plain, silence

ClickException: type[Exception] = typer.BadParameter.__mro__[2]  # from click, or from the click bundled with typer

WATCH, MODELS, MACHINE = "Watch", "Models and policies", "This machine"
COMMANDS = {  # listed in --help in this order
    "run": ("edgevlm.apps.commands.watch:run", "Watch a stream and answer questions about it.", WATCH),
    "watch": ("edgevlm.apps.commands.watch:watch", "Report when the answer to a question becomes yes.", WATCH),
    "serve": ("edgevlm.apps.commands.watch:serve", "Serve cameras over HTTP, with a web page.", WATCH),
    "ask": ("edgevlm.apps.commands.watch:ask", "Ask a running server.", WATCH),
    "digest": ("edgevlm.apps.commands.watch:digest", "Show what happened while you were away.", WATCH),
    "journal": ("edgevlm.apps.commands.watch:journal", "Show the journals of cameras.", WATCH),
    "forget": ("edgevlm.apps.commands.watch:forget", "Delete what was seen, from memory and disk.", WATCH),
    "config": ("edgevlm.apps.commands.watch:config", "Check a server's configuration.", WATCH),
    "plan": ("edgevlm.apps.commands.models:plan", "Estimate memory and speed before building anything.", MODELS),
    "models": ("edgevlm.apps.commands.models:models", "List models, their memory and their speed here.", MODELS),
    "export": ("edgevlm.apps.commands.models:export", "Turn a checkpoint into a bundle that edgevlm runs.", MODELS),
    "build": ("edgevlm.apps.commands.models:build", "Build a bundle's TensorRT engines on this device.", MODELS),
    "bundles": ("edgevlm.apps.commands.models:bundles", "List, share, verify and remove bundles.", MODELS),
    "policies": ("edgevlm.apps.commands.models:policies", "List the policies and their settings.", MODELS),
    "calibrate": ("edgevlm.apps.commands.models:calibrate", "Choose the best policy for a model.", MODELS),
    "doctor": ("edgevlm.apps.commands.machine:doctor", "Check this machine and suggest fixes.", MACHINE),
    "check": ("edgevlm.apps.commands.machine:check", "Check a policy, source, family or engine.", MACHINE),
    "cameras": ("edgevlm.apps.commands.machine:cameras", "List this machine's cameras.", MACHINE),
    "power": ("edgevlm.apps.commands.machine:power", "Show the power this machine draws.", MACHINE),
    "state": ("edgevlm.apps.commands.machine:state", "Inspect snapshots, or make a key for them.", MACHINE),
    "bench": ("edgevlm.bench.cli:app", "Measure speed, memory and accuracy.", MACHINE),
}
HELPS = {  # advice by the errno of a failed system call
    errno.EMFILE: "raise the limit on open files: ulimit -n",
    errno.ENFILE: "raise the system's limit on open files: sysctl fs.file-max",
    errno.EAGAIN: str(NoThreads()),
    errno.ENOMEM: "stop other programs",
    errno.EPERM: "a sandbox (seccomp, AppArmor) may forbid it",
    errno.ENOSYS: "a sandbox (seccomp, AppArmor) may forbid it",
}
LISTS = "try edgevlm models, policies, cameras or bundles list"
app = lazy_app(
    COMMANDS,
    name="edgevlm",
    help="Watch a camera within fixed memory and answer questions about what it saw.",
    context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "EDGEVLM"},
    epilog="Options can be set in the environment: EDGEVLM_RUN_MODEL is run's --model.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from edgevlm import __version__

        typer.echo(f"edgevlm {__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", "-V", help="Print the version and exit.", is_eager=True, callback=_print_version)
]


@app.callback()
def _common(version: Version = False) -> None: ...


def main() -> None:
    """Run the command line. A user error prints one line and exits with status 2."""
    mask_argv()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # keeps SIGHUP ignored under nohup
            signal.signal(number, signal.default_int_handler)
    guard_streams()
    first, *rest = sys.argv[1:] or [""]
    typed = {"help": [*rest, "--help"], "version": ["--version"]}.get(first, sys.argv[1:])
    try:
        code = app(typed, prog_name="edgevlm", standalone_mode=False)
        sys.stdout.flush()
    except UserError as error:
        _fail(str(error))
    except ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            typer.echo(str(error), err=True)
            sys.exit(2)
        _fail(_usage(error))
    except (BrokenPipeError, SystemExit) as end:
        if not isinstance(end, BrokenPipeError) and not isinstance(end.__context__, BrokenPipeError):
            raise  # typer itself exits with 1 on a closed pipe
        silence(sys.stdout)
        code = 0
    except UnicodeEncodeError as error:
        _fail(f"{error.object} (not UTF-8: rename the file, or link to it under another name)")
    except MemoryError:
        _fail("not enough memory; stop other programs, or use a smaller --budget or --chunk")
    except OSError as error:
        silence(sys.stdout)
        _fail(_failure(error))
    except ImportError as error:
        _fail(f"part of the installation cannot be loaded ({error}); run edgevlm doctor to see what to reinstall")
    except RuntimeError as error:
        if not NoThreads.is_in(error):
            raise
        _fail(str(NoThreads()))
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except BaseException as error:
        if isinstance(error, Exception) or not is_fault(error):
            raise
        _fail(str(UserError(f"a library failed ({error}); set EDGEVLM_DEBUG=1 to see where")))
    if code == 130:  # also typer's exit code after ctrl-C
        note_stopped()
    sys.exit(code if isinstance(code, int) else 0)


def _fail(line: str) -> NoReturn:
    if os.environ.get("EDGEVLM_DEBUG"):
        traceback.print_exc()
    typer.echo(f"edgevlm: {plain(mask_credentials(line))}", err=True)
    sys.exit(2)


def _failure(error: OSError) -> str:
    """Describe a failed system call by its file or, without a file, by the function that made the call."""
    why = error.strerror or str(error)
    if error.filename:
        return f"{os.fsdecode(error.filename)}: cannot be read or written ({why})"
    frame, helps = (
        traceback.extract_tb(error.__traceback__)[-1],
        HELPS.get(error.errno or 0, "set EDGEVLM_DEBUG=1 to see where"),
    )
    if frame.filename.endswith("tempfile.py"):
        helps = "set TMPDIR to a writable folder"
    return f"{os.path.basename(frame.filename)}: {frame.name} failed ({why}); {helps}"


def _usage(error: Exception) -> str:
    """Return a usage error in one line, with what to do next."""
    if isinstance(error, typer.BadParameter):
        error.message = reason(error.message)
    context, words = getattr(error, "ctx", None), " ".join(str(getattr(error, "format_message", error.__str__)()).split())
    path = context.command_path if context else "edgevlm"
    words = re.sub(r"^Got unexpected extra argument\(s\) \((.*)\)$", r"unexpected argument \1", words).strip()
    words = words[:1].lower() + words[1:]
    if path == "edgevlm run" and (word := re.match(r"unexpected argument (\S+)", words)):
        return f"{words}; did you mean {_source_or_model(word[1])} {word[1]}?"
    if words.startswith("no such command 'list'"):
        return f"no such command 'list'; {LISTS}"
    return f"{words.rstrip('.')}; see {path} --help"


def _source_or_model(word: str) -> str:
    if re.match(r"\d+$|/dev/|demo$|\w+://", word):
        return "--camera"
    is_video = os.path.isfile(word) or word.lower().endswith((".avi", ".m4v", ".mkv", ".mov", ".mp4", ".webm"))
    return "--video" if is_video else "--model"
