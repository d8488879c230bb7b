"""Two sessions of the demo model with questions, reads of statistics and snapshots from many threads at once.

``tests/sanitize.sh thread`` runs it against an extension built with ThreadSanitizer, which reports what two threads touch
without an order between them.
"""

import sys
import tempfile
import threading
import time
from pathlib import Path

from edgevlm.calib.demo.world import World
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


def main(policies: list[str]) -> None:
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
