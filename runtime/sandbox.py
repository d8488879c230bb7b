"""Chat templates, which come from elsewhere: rendered by one helper process, which has little memory and time for each.

Nothing inside Jinja can bound what a template takes: one call of ``str.find`` or ``%`` takes all there is. The helper is
Jinja's own sandbox in a process with limits. It starts with the first template that is not in KNOWN (.2 s, 22 MB) and lives as
long as this process; a rendering takes .1 ms more than here.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import subprocess
import sys
import threading
from functools import lru_cache
from typing import Any

from edgevlm.errors import UserError

CPU_S = 2  # processor time of a rendering; the chat templates of published models take a millisecond
WAIT_S = 60.0  # for one, on a machine that does much else
MEMORY = 1 << 28  # bytes that the helper may map beside what it starts with
LONGEST = 1 << 20  # characters of a text
KNOWN = {  # SHA-256 of templates that are rendered here: the demo's and SmolVLM's default
    "11ead1817a1a6aee0fa8ae634dee8b58e99ebc088183b4a8f71efe28abd2f534",
    "dad132fe0567c3de66c99ad7a9db6ff407329f33a99f7d8ba3d0a140eb82c578",
}


def render(template: str, **values: Any) -> str:
    """The text of ``template``. Raises UserError for one that fails, wants out of its sandbox, or takes too much."""
    if hashlib.sha256(template.encode()).hexdigest() in KNOWN:
        kind, text = _render(template, values)
    else:
        kind, text = _helper.ask(template, values)
    if kind == "text":
        return text
    raise UserError(f"the chat template does not render ({text}); use the template that belongs to the model")


class Helper:
    """The process, started when first asked; any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, template: str, values: dict[str, Any]) -> tuple[str, str]:
        """``"text"`` and a text, or ``"refused"`` and why. A helper that a template was too much for is started anew."""
        request = json.dumps([template, values]).encode() + b"\n"
        with self._lock:
            process = self._running()
            try:
                assert process.stdin is not None
                process.stdin.write(request)
                process.stdin.flush()
                kind, text = json.loads(self._line(process))
                return str(kind), str(text)
            except (OSError, ValueError):
                self._end()
                return "refused", f"it takes more than {CPU_S} s or {MEMORY >> 20} MB"
            except BaseException:  # an interrupt: its answer must not be taken for the next one's
                self._end()
                raise

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            # imports from where this process does, never from the current folder; a session of its own: ctrl-C comes here.
            # A folder that is itself a package is there only while OpenCV is being imported: its ``typing`` hides Python's
            paths = [path for path in sys.path if not os.path.exists(os.path.join(path, "__init__.py"))]
            code = f"import sys; sys.path[:] = {paths!r}; from {__name__} import main; main()"
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
                )
            except OSError as error:
                raise UserError(f"the process that renders chat templates cannot be started ({error.strerror})") from None
        return self._process

    def _line(self, process: subprocess.Popen[bytes]) -> bytes:
        """The helper's answer. Raises OSError where there is none in time, or it is ended."""
        assert process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([process.stdout], [], [], WAIT_S)
            part = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
            if not part or len(line) > 8 * LONGEST:
                raise OSError
            line += part
        return line

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def leave_to_parent(self) -> None:
        """In a process that was forked: the helper belongs to the other one."""
        self._lock = threading.Lock()
        process, self._process = self._process, None
        if process is not None:
            process.returncode = 0
            nowhere = os.open(os.devnull, os.O_RDWR)
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                os.dup2(nowhere, pipe.fileno())
            os.close(nowhere)


_helper = Helper()
os.register_at_fork(after_in_child=_helper.leave_to_parent)


def _render(template: str, values: dict[str, Any]) -> tuple[str, str]:
    try:
        text = _compiled(template).render(**values)
    except MemoryError:  # it ends the helper
        raise
    except Exception as error:  # whatever a template does
        return "refused", " ".join(str(error).split())[:200] or type(error).__name__
    return ("text", text) if len(text) <= LONGEST else ("refused", f"it is longer than {LONGEST} characters")


@lru_cache(8)
def _compiled(template: str) -> Any:
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(template)


def main() -> None:
    """In the helper: a request a line on stdin, an answer a line on stdout."""
    import resource
    import signal

    _compiled("")
    answers = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)
    mapped = int(open("/proc/self/statm").read().split()[0]) * os.sysconf("SC_PAGE_SIZE")  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # kills, also within one long call
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        answer = _render(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        raw = json.dumps(answer).encode() + b"\n"
        while raw:
            raw = raw[os.write(answers, raw) :]
