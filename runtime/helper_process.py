"""Call functions in a helper process, which may crash, hang or run out of memory without harming the calling process."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from importlib import import_module
from typing import Any

from edgevlm.errors import UserError
from edgevlm.progress import StandardError, guard_streams

LONGEST = 1 << 23  # the maximum length of a call or a result, in bytes
END_S = 5.0


class HelperEnded(UserError):
    """A helper process ended during a call. ``code``: the exit status, negative for a signal (-9: usually out of memory)."""

    def __init__(self, code: int) -> None:
        how = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
        super().__init__(f"the helper process {how}; stop other programs and run the command again")
        self.code = code


class Helper:
    """A process that runs functions for the threads of this process, one call at a time. The first call starts that helper.

    Arguments and results are JSON (paths become text). If the process ends during a call, the next call starts a new process.
    The helper has the caller's import path, except the current folder. Ctrl-C interrupts only the calling process.

    ``memory``: the maximum number of bytes that the helper may map, not counting what it maps for its ``imports``. ``cpu_s``:
    the maximum processor time of a call, in seconds. ``wait_s``: the maximum wait for a line, in seconds.
    """

    def __init__(
        self, *, memory: int | None = None, cpu_s: float = 0, wait_s: float | None = None, imports: Iterable[str] = ()
    ) -> None:
        self._settings: dict[str, Any] = {"memory": memory, "cpu_s": cpu_s, "imports": list(imports)}
        self._wait_s = wait_s
        self._pid = 0
        self._leave_to_parent()

    def __enter__(self) -> Helper:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, function: str, *arguments: Any, **options: Any) -> Any:
        """Call a function and return its result. ``function``: the function's name, as ``module:function``. Callable options
        run in the calling process.

        Raises the function's UserError, or HelperEnded if the process ends, exceeds a limit or does not answer.
        """
        result = None
        callbacks = {name: options.pop(name) for name in list(options) if callable(options[name])}
        for kind, *values in self._lines([function, arguments, options, list(callbacks)]):
            if kind == "result":
                (result,) = values
            else:
                callbacks[kind](*values)
        return result

    def lines(self, function: str, *arguments: Any, **options: Any) -> Iterator[Any]:
        """Call a generator and yield its results. Raises the same errors as :meth:`call`.

        Closing the generator early ends the process.
        """
        for kind, *values in self._lines([function, arguments, options, []]):
            if kind == "line":
                yield values[0]

    def _leave_to_parent(self) -> None:
        if self._pid != os.getpid():
            self._pid, self._lock = os.getpid(), threading.Lock()
            self.process: subprocess.Popen[bytes] | None = None

    def close(self) -> None:
        """End the helper process. A later call starts a new process."""
        self._leave_to_parent()
        process, self.process = self.process, None
        if process is not None:
            process.terminate()
            try:
                process.communicate(timeout=END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()

    def _lines(self, request: list[Any]) -> Generator[list[Any], None, None]:
        self._leave_to_parent()
        with self._lock:
            process = self._running()
            assert process.stdin is not None
            reader = self._read(process)
            try:
                process.stdin.write(json.dumps(request, default=str).encode() + b"\n")
                process.stdin.flush()
                while (line := json.loads(next(reader)))[0] not in ("result", "error"):
                    yield line
            except (OSError, ValueError, StopIteration):
                self.close()
                raise HelperEnded(process.returncode) from None
            except BaseException:  # after an interrupt, the next call must not read the rest of this answer
                self.close()
                raise
        if line[0] == "error":
            raise UserError(line[1])
        yield line

    def _read(self, process: subprocess.Popen[bytes]) -> Iterator[bytes]:
        assert process.stdout is not None
        rest = b""
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        while len(rest) < LONGEST and poll.poll(self._wait_s and self._wait_s * 1000):
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                process.wait()
                return
            *lines, rest = (rest + part).split(b"\n")
            yield from lines

    def _running(self) -> subprocess.Popen[bytes]:
        if self.process is None or self.process.poll() is not None:
            self.close()
            # while OpenCV is being imported, sys.path has a package's folder, whose ``typing`` module would hide Python's
            paths = [path for path in sys.path if not os.path.exists(os.path.join(path, "__init__.py"))]
            code = f"import sys; sys.path[:] = {paths!r}; from {__name__} import serve; serve(**{self._settings!r})"
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
                )
            except OSError as error:
                raise UserError(f"a helper process cannot be started ({error.strerror})") from None
        return self.process


def call_in_helper(function: str, *arguments: Any, **options: Any) -> Any:
    """Call a function in a new process, so that nothing that it imports stays in memory.

    If the process is killed, the UserError's message begins with the call's first argument.
    """
    with Helper() as helper:
        try:
            return helper.call(function, *arguments, **options)
        except HelperEnded as error:
            raise UserError(f"{arguments[0]}: {error}") from None


def serve(memory: int | None, cpu_s: float, imports: list[str]) -> None:
    """Answer calls on stdin in the helper process. What a call prints goes to stderr, or is dropped if ``memory`` is set."""
    import resource
    import signal

    answers = os.dup(1)
    os.dup2(2, 1)
    guard_streams(StandardError)
    for module in imports:
        import_module(module)
    if memory is not None:
        os.dup2(os.open(os.devnull, os.O_RDWR), 2)
        os.dup2(2, 1)
        with open("/proc/self/statm") as file:
            mapped = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (mapped + memory,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the default action kills the process, even during a long call into C
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            _answer(answers, *json.loads(line))
        except BrokenPipeError:
            sys.exit(1)  # the calling process has ended
        signal.setitimer(signal.ITIMER_PROF, 0)


def _answer(answers: int, function: str, arguments: list[Any], options: dict[str, Any], callbacks: list[str]) -> None:
    last: tuple[Any, ...] = ()

    def send(*values: Any) -> None:
        nonlocal last
        if values != last or values[0] == "line":  # skip repeats: a download reports its size in whole MB after every block
            raw = json.dumps(values, default=str).encode() + b"\n"
            while raw:
                raw = raw[os.write(answers, raw) :]
            last = values

    def callback(name: str) -> Callable[..., None]:
        return lambda *values: send(name, *values)

    module, _, name = function.partition(":")
    try:
        result = getattr(import_module(module), name)(*arguments, **options, **{name: callback(name) for name in callbacks})
        if isinstance(result, Iterator):
            for line in result:
                send("line", line)
            result = None
        send("result", result)
    except UserError as error:
        send("error", str(error))
