"""Run the command ``edgevlm`` or ``python -m edgevlm``."""

import os
import signal
import sys
from contextlib import suppress

INTERRUPTED = 130


def main() -> None:
    """Import the command line and run it. An interrupt during the import ends the process without a message."""
    if sys.argv[1:2] != ["export"]:  # only export multiplies whole matrices; elsewhere numpy's threads would spin
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from edgevlm.cli import main as run

    try:
        run()
    except SystemExit as end:
        if end.code != INTERRUPTED:
            raise
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(INTERRUPTED)  # cleanup is done; unloading packages would take seconds


if __name__ == "__main__":
    main()
