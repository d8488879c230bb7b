"""Watch the demo camera within 512 tokens of memory and ask about it: `python examples/watch_and_ask.py`."""

from edgevlm import Session
from edgevlm.apps.sources import open_source

camera = open_source("demo", None)
with Session.open("demo", policy="infinipot-v", budget=512) as session:
    for frame in camera:
        session.watch(frame.image, frame.time_s)
        if session.stats.frames == 64:
            break
    for question in ("how many objects are there now?", "which shape came first?"):
        print(question, end=" ", flush=True)
        for piece in session.ask(question):
            print(piece, end="", flush=True)
        print(f"  (truth: {frame.scene.truth(question)})")
