"""What all tests share: examples are the same in every run; `--hypothesis-profile=fresh` draws new ones."""

import os
import signal

from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:  # one worker a core: no threads beside it in torch
    os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("fresh", deadline=None)
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a job in the background has it ignored; tests of ctrl-C, and children, do not
    signal.signal(signal.SIGINT, signal.default_int_handler)
