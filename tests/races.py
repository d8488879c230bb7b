"""A cache that threads change and read at once, and two sessions of the demo model with questions, reads of statistics and
snapshots from many threads.

``tests/sanitize.sh thread`` runs it against an extension built with ThreadSanitizer, which reports what two threads touch
without an order between them.
"""

import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np

from edgevlm.calib.demo.world import World
from edgevlm.errors import CacheError
from edgevlm.runtime import kernels
from edgevlm.runtime.cache import Kind, KVCache, Rows
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session
from edgevlm.runtime.snapshots import SnapshotWriter

FRAMES, QUESTIONS = 24, 3
QUESTION = "how many objects are there now?"


def camera(session: Session, seed: int) -> None:
    """Watch a demo world to its end."""
    world = World(seed)
    for _ in range(FRAMES):
        session.watch(world.step())
    session.flush()


def share_a_cache() -> None:
    """Threads that read and change one cache: each call is done or refused."""
    rows, heads, size = 512, 2, 16
    cache = KVCache(2, heads, size, 2 * rows, inv_freq=1 / 1e4 ** (np.arange(size // 2) / 8))
    position = np.arange(rows, dtype=np.int32)[:, None]
    cache.reserve(rows)
    cache.commit(Rows.text(position, Kind.VISION))
    done, refused = Counter(), Counter()
    keep = np.ones((heads, rows), np.bool_)

    def select() -> None:
        seq = cache.seq(0)
        kernels.top_k(np.zeros(seq.shape, np.float32), seq, np.ones(seq.shape, np.bool_), 9)

    calls = {
        "evict": lambda: cache.evict([keep, None]),
        "shift": lambda: cache.shift(0, np.random.default_rng().integers(0, 999, (heads, rows, 1), np.int32)),
        "reindex": lambda: cache.reindex(0),
        "lengths": lambda: cache.lengths,
        "select": select,
        "infinipot": lambda: kernels.infinipot_select(cache, 2, 3, 9, [3, 3]),
    }

    def repeat(name: str) -> None:
        for _ in range(300):
            try:
                calls[name]()
                done[name] += 1
            except CacheError:
                refused[name] += 1

    threads = [threading.Thread(target=repeat, args=(name,)) for name in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"one cache: {done.total()} calls done, {refused.total()} refused", flush=True)


def main(policies: list[str]) -> None:
    share_a_cache()
    model = Model.load("demo", threads=2)
    for policy in policies:
        with tempfile.TemporaryDirectory() as folder:
            writers = [SnapshotWriter(Path(folder, str(seed)), 0.05, print) for seed in range(2)]
            sessions = [
                Session.open(model, policy=policy, budget=128, chunk=4, state=writer, append="all") for writer in writers
            ]
            over, reads = threading.Event(), [0]

            def read(sessions=sessions, over=over, reads=reads):
                while not over.is_set():
                    reads[0] += sum(repr(session.stats) != "" for session in sessions)
                    time.sleep(0.002)

            def ask(session):
                for _ in range(QUESTIONS):
                    answer = session.ask(QUESTION, "talk", max_tokens=4)
                    next(iter(answer), None)
                    session.ask(QUESTION).cancel()
                    answer.wait()

            cameras = [threading.Thread(target=camera, args=(session, seed)) for seed, session in enumerate(sessions)]
            others = [threading.Thread(target=ask, args=(session,)) for session in sessions] + [threading.Thread(target=read)]
            for thread in [*cameras, *others]:
                thread.start()
            for thread in cameras:
                thread.join()
            over.set()
            for thread in others:
                thread.join()
            for session in sessions:
                session.close()
            done = [session.stats for session in sessions]
            assert all(stats.frames == FRAMES and stats.memory.compressions and stats.snapshots for stats in done)
            print(f"{policy}: {reads[0]} reads, {sum(stats.snapshots for stats in done)} snapshots", flush=True)
    model.close()


if __name__ == "__main__":
    main(sys.argv[1:] or ["h2o", "infinipot-v", "hybrid"])
