"""What the routes of ``edgevlm serve`` answer in JSON, as its OpenAPI description has it."""

from __future__ import annotations

from typing import Any

from edgevlm.apps.schemas import LINES, Fields, object_schema
from edgevlm.apps.watches.watch import Watch

WATCH = Watch.model_json_schema()["properties"]
OBJECTS: dict[str, Fields] = {
    "health": {"status": ("string", "ok.")},
    "model": {
        "id": ("string", "The stream's name."),
        "object": ("string", "model."),
        "created": ("integer", "0."),
        "owned_by": ("string", "The model that watches."),
    },
    "stream": {
        "id": ("string", "Its name."),
        "object": ("string", "stream."),
        "source": ("string", "What is watched, without credentials."),
        "model": ("string", "The model that watches."),
        "policy?": (
            "string",
            "The policy in use. What may be missing is so of a cluster's camera that is not open.",
        ),
        "budget?": ("integer", "Vision tokens kept per layer."),
        "fps": ("number", "Frames per second asked for."),
        "frames_watched?": ("integer", "Frames that the memory has watched, before a restart too."),
        "watched_fps?": ("number", "Frames per second that are watched."),
        "skipped_fps?": ("number", "Frames per second that are skipped because the model is busy."),
        "state": ("string", "initialising, running, stalled, reconnecting, ended, failed, paused, or in a cluster starting."),
        "problem": ("string|null", "Why it is not running, without credentials."),
        "time_s?": ("number|null", "Stream time of the newest frame, in seconds."),
        "frame_time?": ("string|null", "When that was: RFC 3339, UTC."),
        "stats?": ("object|null", "The figures of the stats line of edgevlm run --json; null before the first."),
        "node?": ("string|null", "In a cluster: the node that watches it."),
        "epoch?": ("integer|null", "In a cluster: how often it was given a node."),
        "lost_s?": ("number|null", "In a cluster: seconds that its last move lost."),
    },
    "policy": {
        "id": ("string", "Its name."),
        "object": ("string", "policy."),
        "idea": ("string", "What it keeps."),
    },
    "event": {
        "event": ("string", "watch."),
        "schema": ("integer", "1, the version of these fields."),
        "id": ("string", "32 hexadecimal digits."),
        "watch": ("string", "The watch's name."),
        "camera": ("string", "The stream's name."),
        "state": ("string", "open or close."),
        "time": ("string", "When: RFC 3339, UTC."),
        "probability": ("number", "Of the answer."),
        "evidence": ("array", "What it was read from, as in an answer; jpeg_url is the server's."),
    },
    "opening": {"event": ("string", "opening."), **LINES["digest"]["opening"]},
    "line": {"event?": ("string", "line; in a digest only."), **LINES["journal"]["line"]},
    "watch": {
        "id": ("string", "Its name."),
        "object": ("string", "watch."),
        **{name: (each["type"], "As in Watch.") for name, each in WATCH.items() if name not in ("name", "cameras")},
        "cameras": ("array", "Of each: camera, state (open or closed), answer, probability, opened, paused."),
    },
    "node": {
        "id": ("string", "Its name."),
        "object": ("string", "node."),
        "cameras": ("integer", "How many it watches."),
        "heard_s": ("number|null", "Seconds since the head last heard of it; null while it, or the head, is away."),
        "leaving": ("boolean", "Whether it ends, and its cameras move to others."),
    },
    "forget": {
        "object": ("string", "forget."),
        "streams": ("object", "Of each camera how many rows, thumbnails, events, lines and so on were deleted."),
        "waiting?": ("array", "In a cluster: nodes that are away, and cameras that are not open; they follow later."),
    },
    "reload": {
        "object": ("string", "reload."),
        "done": ("array", "What was done, a line each."),
    },
}
EXTRA: dict[str, Fields] = {  # of lists, beside object and data
    "stream": {"watts": ("number|null", "Of the machine, where it has a meter.")},
    "opening": {"since": ("string", "From when: RFC 3339, UTC."), "until": ("string", "Until when.")},
}


def answer_of(kind: str, status: int = 200) -> dict[int | str, dict[str, Any]]:
    """One object, as a route's ``responses``."""
    return _json(status, {**object_schema(OBJECTS[kind]), "title": kind})


def list_of(*kinds: str) -> dict[int | str, dict[str, Any]]:
    """A list of such objects."""
    schema = object_schema({"object": ("string", "list, or digest."), "data": ("array", ""), **EXTRA.get(kinds[0], {})})
    schema["properties"]["data"]["items"] = {"anyOf": [object_schema(OBJECTS[kind]) for kind in kinds]}
    return _json(200, {**schema, "title": f"list of {' or '.join(kinds)}"})


def _json(status: int, schema: Any) -> dict[int | str, dict[str, Any]]:
    return {status: {"content": {"application/json": {"schema": schema}}}}
