"""The command ``edgevlm``, and ``python -m edgevlm``."""

import signal


def main() -> None:
    """Load the command line and hand over; an interrupt meanwhile ends the process as if nothing had been running."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from edgevlm.cli import main as run

    run()


if __name__ == "__main__":
    main()
