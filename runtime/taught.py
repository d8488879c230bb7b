"""The questions that the demo model was taught, and a parser for questions that users type."""

import difflib
import re
from dataclasses import dataclass
from typing import NamedTuple

COLORS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "white")
SHAPES = ("square", "circle", "triangle", "diamond", "cross", "ring", "heart", "star")
COUNTS = ("0", "1", "2", "3")
COLOR, SHAPE = "<color>", "<shape>"  # the slots in a phrasing
TAUGHT = """
now_count: how many objects are there now? | how many objects do you see now? | how many things are visible now?
now_color: what color is the <shape> now? | which color does the <shape> have now?
now_shape: what shape is the <color> object now? | which shape does the <color> object have now?
now_where: where is the <color> <shape> now? | in which corner is the <color> <shape> now?
now_seen: is there a <color> <shape> now? | do you see a <color> <shape> now?
past_color: what color was the <shape>? | which color did the <shape> have?
past_shape: what shape was the <color> object? | which shape did the <color> object have?
past_where: where was the <color> <shape>? | in which corner was the <color> <shape>?
past_seen: was there a <color> <shape>? | did you see a <color> <shape>?
first_shape: which shape came first? | what shape was the first object?
first_color: which color came first? | what color was the first object?
before: what came before the <color> <shape>? | which object came before the <color> <shape>?
left_last: what left last? | which object left last?
count_color: how many <color> objects were there? | how many <color> objects did you see?
"""


@dataclass(frozen=True, slots=True)
class Question:
    """A question for the demo model: its kind, its text as taught to the model, and the words in its slots."""

    kind: str
    text: str
    color: int | None = None
    shape: int | None = None


class QuestionKind(NamedTuple):
    """A kind of question and its phrasings."""

    phrasings: tuple[str, ...]

    def has(self, slot: str) -> bool:
        return slot in self.phrasings[0]


KINDS = {
    kind: QuestionKind(tuple(phrasings.split(" | ")))
    for kind, phrasings in (line.split(": ", 1) for line in TAUGHT.strip().splitlines())
}
OFFERED = tuple(KINDS)  # the shipped demo model has learned all kinds


def all_questions() -> list[str]:
    """Return all phrasings of all kinds of question, with the slots `<color>` and `<shape>` not filled in."""
    return [phrasing for kind in OFFERED for phrasing in KINDS[kind].phrasings]


def ask(kind: str, phrasing: int, color: int | None = None, shape: int | None = None) -> Question:
    text = KINDS[kind].phrasings[phrasing]
    if color is not None:
        text = text.replace(COLOR, COLORS[color])
    if shape is not None:
        text = text.replace(SHAPE, SHAPES[shape])
    return Question(kind, text.replace(" a orange", " an orange"), color, shape)


def parse(text: str) -> Question | None:
    """Return the taught question that a text asks, or None. Ignores case, spaces, final punctuation and British spelling."""
    words = " ".join(text.lower().replace("colour", "color").split()).rstrip(" ?!.")
    words = re.sub(r"\ban? ", "a ", words)
    for pattern, kind, phrasing in _PATTERNS:
        if match := pattern.fullmatch(words):
            slots = match.groupdict()
            color = COLORS.index(slots["color"]) if "color" in slots else None
            shape = SHAPES.index(slots["shape"]) if "shape" in slots else None
            return ask(kind, phrasing, color, shape)
    return None


def _pattern(phrasing: str) -> re.Pattern[str]:
    text = phrasing.rstrip("?")
    for slot, name, names in ((COLOR, "color", COLORS), (SHAPE, "shape", SHAPES)):
        text = text.replace(slot, f"(?P<{name}>{'|'.join(names)})")
    return re.compile(re.sub(" now$", "(?: now)?", text))


_PATTERNS = [(_pattern(text), kind, place) for kind in OFFERED for place, text in enumerate(KINDS[kind].phrasings)]


def never_taught(text: str, listing: str = "edgevlm run --questions") -> str:
    """Return the message for an unknown question, with three similar questions and the command that lists all."""
    words = text.lower().split()
    slots = [
        (slot, next((name for name in names if name in words), names[0])) for slot, names in ((COLOR, COLORS), (SHAPE, SHAPES))
    ]
    known = [phrasing.replace(*slots[0]).replace(*slots[1]) for phrasing in all_questions()]
    near = " ".join(difflib.get_close_matches(text.lower(), known, n=3, cutoff=0))
    more = f"All: {listing}. Models for any question: edgevlm models"
    return f"The demo model was never taught this question. Nearest: {near} {more}"
