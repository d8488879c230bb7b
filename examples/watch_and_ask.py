"""Watch the demo camera within 1,000 tokens of memory and ask about it: `python examples/watch_and_ask.py`."""

from itertools import islice

from edgevlm import Session, open_source

with Session.open("demo", budget="1k") as session:
    for frame in islice(open_source("demo"), 64):
        session.watch(frame.image, frame.time_s)  # uint8 RGB [H, W, 3]; Session.open(bgr=True) takes OpenCV's frames
    print(session.ask("how many objects are there now?"))
    for piece in session.ask("which shape came first?"):  # as it is generated; `async for` works too
        print(piece, end="", flush=True)
    print(f"\n{session.stats.frames} frames, {session.stats.tokens} tokens kept")
