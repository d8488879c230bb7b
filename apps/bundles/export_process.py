"""An export in a process of its own, so that nothing of the exporter stays in memory once a stream begins."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgevlm.errors import UserError
from edgevlm.packages import needed

Tell = Callable[[str], object]
SCALED, PLAIN = "edgevlm.apps.bundles.awq:export_scaled", "edgevlm.export:export_checkpoint"


def exporter(scaled: bool) -> Callable[..., Path]:
    """``export_checkpoint``, or for AWQ's scales the one that measures them first."""
    module, _, name = (SCALED if scaled else PLAIN).partition(":")
    export: Callable[..., Path] = getattr(needed(module, "exporting"), name)
    return export


def export_apart(checkpoint: Path, out: Path, *, scaled: bool, progress: Tell, notice: Tell, **options: Any) -> None:
    """As :func:`edgevlm.export.export_checkpoint`, by another process, which ends before this returns.

    Raises UserError as that does, and where the process is killed.
    """
    request = json.dumps([str(checkpoint), str(out), scaled, options], default=str)
    told = {"progress": progress, "notice": notice}
    # a session of its own: ctrl-C comes to this process alone, which ends the other
    with subprocess.Popen(
        [sys.executable, "-m", __name__, request], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, encoding="utf-8",
        start_new_session=True,
    ) as child:  # fmt: skip
        try:
            for line in child.stdout or ():
                kind, text = json.loads(line)
                if kind == "error":
                    raise UserError(text)
                told[kind](text)
        except BaseException:
            child.terminate()
            child.wait()
            raise
    if child.returncode:
        how = f"signal {-child.returncode}" if child.returncode < 0 else f"status {child.returncode}"
        raise UserError(f"{checkpoint}: the export was ended by {how}; end other programs and give the command again")


def main() -> None:
    """Export as the first argument says and tell of it on stdout, a JSON line each."""
    checkpoint, out, scaled, options = json.loads(sys.argv[1])
    options["camera"] = tuple(options["camera"])

    def telling(kind: str) -> Tell:
        return lambda text: print(json.dumps([kind, text]), flush=True)

    try:
        exporter(scaled)(Path(checkpoint), Path(out), progress=telling("progress"), notice=telling("notice"), **options)
    except UserError as error:
        telling("error")(str(error))
    except BrokenPipeError:
        sys.exit(1)  # nobody waits any more


if __name__ == "__main__":
    main()
