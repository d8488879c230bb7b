"""Work in which each call goes wrong in turn: one on files fails, an allocation does, or the process is killed there.

``python tests/faults/exhaust.py WORK`` does the work of that name again and again: in each run the Nth call of one kind is
disturbed, for every N until the work has no more of them; ``all`` for each work. Afterwards nothing may be wrong: no traceback,
no byte and no answer but those of undisturbed work, nothing lost that was there before, and nothing that was to be written
missing without a word. ``--some 10`` takes ten calls of each kind, evenly spread, ``--only 1`` is one run.
``--sites`` takes of allocations, which may be many thousands, the first, the last and a middle one of each place that they come
from: the innermost four calls inside the extension. Needs a C compiler.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from works import WORKS, Run, Tell, Work

from edgevlm.errors import UserError

TESTS = Path(__file__).parents[1]
SECONDS = 600  # that a run may take, on a machine that does much else
WRITE, SYNC, RENAME, CHANGE, MAP, READ, OPEN, ALLOCATE = (1 << bit for bit in range(8))  # as in shim.c
WRITES = WRITE | SYNC | RENAME | CHANGE
ANY, COUNT = 0, 1  # sites of allocations: any; any, and how many come from each is counted
ONCE, HALF, LASTING = (0, 0), (1, 0), (0, 1)  # halves, lasting
FAULTS = {  # kinds of calls, what they fail with, how
    "write": (WRITE, errno.EIO, ONCE),
    "short": (WRITE, errno.EIO, HALF),
    "full": (WRITE, errno.ENOSPC, LASTING),
    "sync": (SYNC, errno.EIO, ONCE),
    "rename": (RENAME, errno.EIO, ONCE),
    "change": (CHANGE, errno.EIO, ONCE),
    "map": (MAP, errno.ENOMEM, ONCE),
    "read": (READ, errno.EIO, ONCE),
    "half": (READ, errno.EIO, HALF),
    "open": (OPEN, errno.EMFILE, ONCE),
    "dead": (WRITES | MAP | READ | OPEN, errno.EIO, LASTING),
    "allocate": (ALLOCATE, errno.ENOMEM, ONCE),
    "kill": (WRITES, 0, ONCE),
}


def in_child(work: Callable[[Tell], Any]) -> Run:
    """What came of work in a forked process."""
    out, into = os.pipe()
    child = os.fork()
    if not child:
        os.close(out)
        _work_and_exit(work, into)
    os.close(into)
    raw, until = b"", time.monotonic() + SECONDS
    while select.select([out], [], [], max(0.0, until - time.monotonic()))[0] and (part := os.read(out, 1 << 20)):
        raw += part
    os.close(out)
    hangs = time.monotonic() >= until
    os.kill(child, signal.SIGKILL)  # it has closed its end, unless it hangs
    _, status = os.waitpid(child, 0)
    told = [json.loads(line) for line in raw.splitlines()]
    ends = [word for word, _ in told if word in ("done", "refused", "failed")]
    end = "hang" if hangs else "failed" if "failed" in ends else ends[-1] if ends else "killed"
    return Run(end, status, told)


def _work_and_exit(work: Callable[[Tell], Any], into: int) -> None:
    def tell(word: str, what: Any) -> None:
        os.write(into, json.dumps([word, what]).encode() + b"\n")

    def failed(error: BaseException | None) -> None:
        frames = traceback.extract_tb(None if error is None else error.__traceback__)
        places = " ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-6:])
        tell("failed", f"{type(error).__name__}: {str(error)[:300]} ({places})")

    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    threading.excepthook = lambda caught: failed(caught.exc_value)
    sys.unraisablehook = lambda caught: failed(caught.exc_value)
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: tell("said", record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("edgevlm").addHandler(handler)
    end: tuple[str, Any] = ("done", "")
    try:
        work(tell)
    except (UserError, MemoryError) as error:  # the command line's one line
        end = ("refused", str(error)) if "\n" not in str(error) else ("failed", str(error))
    except BaseException as error:
        failed(error)
    tell(*end)
    os.close(into)
    signal.pause()


class Shim:
    """The library, preloaded."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "/_native." in line]
        bounds = [int(bound, 16) for line in maps for bound in line[0].split("-")]
        self._code = min(bounds), max(bounds)

    def arm(self, folder: Path, fault: str | None, number: int, site: int) -> None:
        kinds, error, (halves, lasting) = FAULTS[fault] if fault else (255, 0, ONCE)
        under, code = os.fsencode(folder), map(ctypes.c_size_t, self._code)
        self._library.shim_arm(under, kinds, ctypes.c_long(number), error, halves, lasting, *code, ctypes.c_uint64(site))

    def sites(self) -> list[tuple[int, int]]:
        """Places that allocations came from, and how many did."""
        place, site, found = ctypes.c_int(0), ctypes.c_uint64(0), []
        self._library.shim_site.restype = ctypes.c_long
        while calls := self._library.shim_site(ctypes.byref(place), ctypes.byref(site)):
            found.append((site.value, calls))
        return sorted(found)

    def disarm(self) -> tuple[list[int], int]:
        """Calls by kind, and how many were disturbed."""
        self._library.shim_disarm()
        return [self._library.shim_seen(bit) for bit in range(8)], self._library.shim_struck()


def disturbed(
    work: Work, folder: Path, shim: Shim, fault: str | None = None, number: int = sys.maxsize, site: int = COUNT
) -> Run:
    """Do the work in a copy of what is there before, and check it. Without a fault calls are counted."""
    copy = folder.parent / "copy"
    shutil.copytree(folder, copy, symlinks=True)

    def do(tell: Tell) -> None:
        shim.arm(copy / "disk", fault, number, site)
        try:
            work.do(copy, tell)
        finally:
            tell("calls", shim.disarm())
            tell("sites", shim.sites())

    run = in_child(do)
    if run.end in ("done", "refused", "killed"):
        checked = in_child(lambda tell: work.check(copy, run))
        if checked.end != "done":
            run.told += [("said", each) for each in checked.of("refused")] + [("failed", f"afterwards: {checked.told}")]
            run.end = "wrong"
    shutil.rmtree(copy)
    return run


def numbers_of(total: int, given: argparse.Namespace) -> Iterable[int]:
    """Which of so many calls are disturbed, each in a run of its own."""
    if given.only is not None:
        return [given.only]
    if given.some:
        return sorted({1 + total * (2 * place + 1) // (2 * given.some) for place in range(given.some)}) if total else []
    return range(1, total + 1)


def exhaust(name: str, folder: Path, given: argparse.Namespace) -> Counter[str]:
    """Prints each run that ended badly, and counts by fault; returns how all ended."""
    work, shim, ends = WORKS[name], Shim(), Counter[str]()
    good = folder / name / "good"
    (good / "disk").mkdir(parents=True)
    made = in_child(lambda tell: work.prepare(good))
    assert made.end == "done", made.told
    whole = disturbed(work, good, shim)
    assert whole.silent, whole
    for fault in given.fault or FAULTS:
        count, began = Counter[str](), time.monotonic()
        total = sum(calls for bit, calls in enumerate(whole.of("calls")[0][0]) if FAULTS[fault][0] >> bit & 1)
        cases = [(ANY, number) for number in numbers_of(total, given)]
        if given.sites and fault == "allocate":
            sites = whole.of("sites")[0]
            print(f"{name} {fault}: {len(sites)} sites", flush=True)
            cases = [(site, 1) for site, _ in sites]
            cases += [(site, calls) for site, calls in sites if calls > 1]
            cases += [(site, (calls + 1) // 2) for site, calls in sites if calls > 2]
        for site, number in cases:
            run = disturbed(work, good, shim, fault, number, site)
            end = "warned" if run.end == "done" and not run.silent else run.end
            if run.end in ("done", "refused") and not run.of("calls")[0][1]:
                count["not reached"] += 1  # threads made fewer calls this time
                continue
            count[end] += 1
            if end not in ("done", "warned", "refused") and not (fault == "kill" and end == "killed"):
                place = f" of site {site:x}" if site else ""
                print(f"{name} {fault} {number}{place} {end}: {run.status} {run.of('failed') or run.of('said')}", flush=True)
                count["bad"] += 1
        ends += count
        counts = ", ".join(f"{many} {end}" for end, many in count.items())
        print(f"{name} {fault}: {total} calls; {counts}; {time.monotonic() - began:.0f} s", flush=True)
    return ends


def compiled(folder: Path) -> Path:
    """The library. Raises FileNotFoundError without a compiler."""
    library = folder / "shim.so"
    source = Path(__file__).with_name("shim.c")
    options = ["-shared", "-fPIC", "-O1", "-fexceptions", "-Wl,--no-as-needed"]
    subprocess.run(["cc", *options, "-o", library, source, "-ldl", "-lstdc++"], check=True)
    return library


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=["all", *WORKS])
    parser.add_argument("--fault", choices=FAULTS, action="append")
    parser.add_argument("--only", type=int)
    parser.add_argument("--some", type=int, default=0, help="so many calls of each kind, evenly spread")
    parser.add_argument("--sites", action="store_true", help="allocations: three of each place that they come from")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        if not hasattr(ctypes.CDLL(None), "shim_arm"):
            environment = {**os.environ, "LD_PRELOAD": str(compiled(Path(scratch))), "OMP_NUM_THREADS": "1"}
            return subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode
        sys.path[:0] = [str(TESTS), str(TESTS / "export")]
        import edgevlm.apps.calibrate
        import edgevlm.apps.journal
        import edgevlm.apps.watches.delivery
        import edgevlm.engines.onnxruntime_cpu
        import edgevlm.export.writer
        import edgevlm.runtime.session  # noqa: F401  once, for all children

        ends = Counter[str]()
        for name in WORKS if given.work == "all" else [given.work]:
            ends += exhaust(name, Path(scratch), given)
    print(f"{ends.total() - ends['bad'] - ends['not reached']} runs, {ends['bad']} bad")
    return bool(ends["bad"])


if __name__ == "__main__":
    sys.exit(main())
