"""What all tests share: examples are the same in every run; `--hypothesis-profile=fresh` draws new ones."""

import os
import signal
import sys

import pytest
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:  # one worker a core: no threads beside it in torch
    os.environ.setdefault("OMP_NUM_THREADS", "1")

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # the commands that tests start would compile the package each time
sys.dont_write_bytecode = False

settings.register_profile("fresh", deadline=None)
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """One worker more than there are cores: tests of servers and cameras wait for half of their time."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" not in os.environ:
        return 1 + (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file stays on one worker, so that the models its fixtures export are exported once; apps, which take longest, first."""
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:  # a job in the background has them ignored; tests of signals do not
        signal.signal(number, handler)
