"""One training stream: frames of the world, what is in each patch, and the truth at the moments asked about."""

from dataclasses import dataclass

import numpy as np

from ..world import History, World

UNKNOWN = -100  # a label that no loss counts


@dataclass(slots=True)
class Stream:
    """T frames with what the losses need to know about them."""

    frames: np.ndarray  # uint8 [T, 56, 56, 3]
    owners: np.ndarray  # int32 [T, 16], number of the object in the patch or -1
    facts: np.ndarray  # int64 [T, 16, len(FACTS)], class labels or UNKNOWN
    asked: dict[int, History]  # frame -> history after it

    @property
    def occupied(self) -> np.ndarray:
        """bool [T, 16]."""
        return self.owners >= 0


# What a token should know after the third layer (auxiliary losses), with the number of classes. Of objects: the entry before
# their own (class 8 for the first object), and how many of their colour came before. Of the last patch of each frame: how many
# objects are present, and which left last (class 8: none did).
OF_OBJECTS = {"prior_color": 9, "prior_shape": 9, "quadrant": 4, "entering": 2, "entries": 16, "alike": 4}
FACTS = OF_OBJECTS | {"present": 4, "gone_color": 9, "gone_shape": 9}


def make_stream(seed: list[int], length: int, asked: list[int], event_rate: float | None = None, hard: bool = False) -> Stream:
    """The first `length` frames of the world of this seed, with histories after the frames `asked`."""
    world = World(seed, event_rate, hard)
    history = world.history
    stream = Stream(
        frames=np.empty((length, 56, 56, 3), dtype=np.uint8),
        owners=np.empty((length, 16), dtype=np.int32),
        facts=np.full((length, 16, len(FACTS)), UNKNOWN, dtype=np.int64),
        asked={},
    )
    identities = [(8, 8)]  # (colour, shape) by number + 1, so that the entry before the first is a class of its own
    for time in range(length):
        stream.frames[time] = world.step()
        stream.owners[time] = world.owners
        if len(identities) == history.entries:
            identities.append((history.things[-1].color, history.things[-1].shape))
        for thing in history.present:
            prior = identities[thing.number]
            entering = int(thing.entered == time)
            alike = sum(other[0] == thing.color for other in identities[1 : thing.number + 1])
            known = (*prior, thing.quadrant, entering, min(history.entries, 15), min(alike, 3))
            stream.facts[time, thing.cell, : len(OF_OBJECTS)] = known
        gone = max(history.gone, key=lambda thing: thing.left or 0, default=None)
        last = (gone.color, gone.shape) if gone else (8, 8)
        stream.facts[time, -1, len(OF_OBJECTS) :] = (len(history.present), *last)
        if time in asked:
            stream.asked[time] = history.snapshot()
    return stream
