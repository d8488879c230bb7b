"""What a row of the cache is."""

from enum import IntEnum


class Kind(IntEnum):
    """Stored as uint8 beside every row."""

    PREFIX = 0  # the system prompt and everything up to the first vision token: never evicted, outside |M|
    VISION = 1
    SUMMARY = 2  # made by a policy from what it evicted: counts in |M|
    TEXT = 3  # a question, an answer, or text inside the stream
