"""A robot with a thread that captures, a thread that drives and a callback for changed answers: `python examples/robot.py`."""

import threading
import time
from itertools import islice
from tempfile import TemporaryDirectory

from edgevlm import Session, open_source


def capture(session: Session) -> None:
    for frame in islice(open_source("demo"), 96):
        session.watch(frame.image, frame.time_s)
        time.sleep(0.03)


with TemporaryDirectory() as folder, Session.open("demo", budget="1k") as session:
    session.on("is there a yellow circle now?", lambda change: print(f"{change.time_s:.1f} s: {change.is_yes}"), every=0.2)
    camera = threading.Thread(target=capture, args=[session])
    camera.start()
    while camera.is_alive():  # the robot's own loop
        time.sleep(0.25)
        held = session.memory()
        print(f"{session!r}: {len(held.number)} frames in memory")
    session.save(folder)
    with Session.open("demo", budget="1k", state=folder) as again:
        print(again.ask("how many objects are there now?"), "objects, also after a restart")
