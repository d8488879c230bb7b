"""An asyncio program with two cameras on one model and streamed answers: `python examples/service.py`."""

import asyncio
from itertools import islice

from edgevlm import Model, Session, open_source
from edgevlm.extend import SourceOptions


async def watch(session: Session, seed: int) -> None:
    for frame in islice(open_source("demo", options=SourceOptions(seed=seed)), 48):
        await asyncio.to_thread(session.watch, frame.image, frame.time_s)


async def ask(session: Session, question: str) -> str:
    return "".join([piece async for piece in session.ask(question)])


async def main() -> None:
    model = Model.load("demo")
    sessions = [Session.open(model, budget="1k") for _ in range(2)]
    await asyncio.gather(*(watch(session, seed) for seed, session in enumerate(sessions)))
    answers = await asyncio.gather(*(ask(session, "how many objects are there now?") for session in sessions))
    print(*(f"camera {number}: {answer.strip()}" for number, answer in enumerate(answers)), sep="\n")
    for session in sessions:
        session.close()
    model.close()


asyncio.run(main())
