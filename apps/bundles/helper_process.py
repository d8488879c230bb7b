"""Work in a process of its own, so that nothing of what it imports stays in memory once a stream begins."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from edgevlm.errors import UserError
from edgevlm.progress import Notify


def call_in_helper(function: str, *arguments: Any, progress: Callable[..., object], notify: Notify, **options: Any) -> Any:
    """Call ``module:function`` in another process, which ends before this returns, and return what it returns, as JSON has it.

    Arguments go there as JSON too, paths as text; ``progress`` and ``notify`` are called here. Raises UserError as the
    function does, and where the process is killed.
    """
    request = json.dumps([function, arguments, options], default=str)
    told: dict[str, Callable[..., object]] = {"progress": progress, "notify": notify}
    result = None
    # a session of its own: ctrl-C comes to this process alone, which ends the other
    with subprocess.Popen(
        [sys.executable, "-m", __name__, request], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, encoding="utf-8",
        start_new_session=True,
    ) as child:  # fmt: skip
        try:
            for line in child.stdout or ():
                kind, *said = json.loads(line)
                if kind == "error":
                    raise UserError(*said)
                if kind == "result":
                    (result,) = said
                else:
                    told[kind](*said)
        except BaseException:
            child.terminate()
            child.wait()
            raise
    if child.returncode:
        how = f"signal {-child.returncode}" if child.returncode < 0 else f"status {child.returncode}"
        raise UserError(f"{arguments[0]}: the helper process was ended by {how}; end other programs and run the command again")
    return result


def main() -> None:
    """Call what the first argument says and tell of it on stdout, a JSON line each."""
    function, arguments, options = json.loads(sys.argv[1])
    module, _, name = function.partition(":")
    last: tuple[Any, ...] = ()

    def tell(*said: Any) -> None:
        nonlocal last
        if said != last:  # a download tells of every block, in whole MB
            print(json.dumps(said, default=str), flush=True)
            last = said

    def progress(*said: Any) -> None:
        tell("progress", *said)

    def notify(line: str) -> None:
        tell("notify", line)

    try:
        tell("result", getattr(import_module(module), name)(*arguments, progress=progress, notify=notify, **options))
    except UserError as error:
        tell("error", str(error))
    except BrokenPipeError:
        sys.exit(1)  # nobody waits any more


if __name__ == "__main__":
    main()
