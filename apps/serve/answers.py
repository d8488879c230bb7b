"""Pydantic models of the JSON that ``edgevlm serve`` returns."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

from pydantic import BaseModel, create_model

from edgevlm.apps import schemas
from edgevlm.apps.schemas import Moment, Record, field, maybe
from edgevlm.apps.watches.watch import WatchSettings


class Health(Record):
    status: str = field("Always ok.")


class Named(Record):
    id: str = field("The id, as used in paths.")
    object: str = field("The kind of object, such as stream or watch.")


class Model(Named):
    created: int = field("Always 0.")
    owned_by: str = field("The model that watches the camera.")
    max_model_len: int = field("Maximum number of tokens in a question, its history and its answer together.")


class Stream(Named):
    name: str = field("The displayed name, in any script.")
    source: str = field("The source, without credentials.")
    model: str = field("The model that watches the camera.")
    policy: str = maybe("The policy in use. In a cluster, some fields are missing while the camera is not open.")
    budget: int = maybe("Vision tokens kept per layer.")
    fps: float = field("Configured frames per second.")
    frames_watched: int = maybe("Frames watched, including those before a restart.")
    watched_fps: float = maybe("Frames per second that the model watches.")
    skipped_fps: float = maybe("Frames per second that are skipped because the model is busy.")
    state: str = field("initialising, running, stalled, reconnecting, ended, failed, paused or, in a cluster, starting.")
    problem: str | None = field("Why the camera is not running, without credentials.")
    time_s: float | None = maybe("Stream time of the newest frame, in seconds.")
    frame_time: str | None = maybe("Wall-clock time of the newest frame: RFC 3339, UTC.")
    stats: dict[str, Any] | None = maybe("The figures of a stats line of edgevlm run --json; null before the first such line.")
    node: str | None = maybe("In a cluster: the node that watches the camera.")
    epoch: int | None = maybe("In a cluster: number of times that the camera was assigned to a node.")
    lost_s: float | None = maybe("In a cluster: seconds not watched during the camera's last move.")


class Policy(Named):
    idea: str = field("What the policy keeps.")


class Event(Record):
    event: str = field("Always watch.")
    version: int = field("Version of the event's fields: 1.", alias="schema")
    id: str = field("32 hexadecimal digits.")
    watch: str = field("The watch's name.")
    camera: str = field("The stream's name.")
    state: str = field("open or close.")
    time: str = field("Time: RFC 3339, UTC.")
    probability: float = field("Probability of the answers that open the watch.")
    evidence: list[Moment] = field("The frames on which the answer is based.")


class Opening(schemas.Opening):
    event: str = field("Always opening.")


class Line(schemas.Line):
    event: str = maybe("Always line; present only in a digest.")


class WatchOnCamera(Record):
    camera: str = field("The stream's name.")
    state: str = field("open or closed.")
    answer: str | None = field("yes, no or not sure; null before the first answer.")
    probability: float | None = field("Newest probability of the answers that open the watch; null before the first answer.")
    opened: str | None = field("When the watch last opened: RFC 3339, UTC; null if it has not opened.")
    paused: bool = field("Whether the watch is paused on this camera.")


class WatchState(WatchSettings, Named):
    name: str = field("The displayed name, in any script.")
    cameras: list[WatchOnCamera] = field("The watch's state on each camera.")


class Forgotten(Record):
    object: str = field("Always forget.")
    streams: dict[str, dict[str, int]] = field("Number of deleted rows, thumbnails, events, journal lines etc. of each camera.")
    waiting: list[str] = maybe("In a cluster: absent nodes and unopened cameras, whose data will be deleted later.")


class Reloaded(Record):
    object: str = field("Always reload.")
    done: list[str] = field("A line for each change or failure.")


WATTS = (float | None, field("Power of the machine in watts; null if unknown."))
SINCE, UNTIL = (str, field("Start of the period: RFC 3339, UTC.")), (str, field("End of the period: RFC 3339, UTC."))


def content(*kinds: type[BaseModel] | str, status: int = 200) -> dict[int | str, dict[str, Any]]:
    """Return a FastAPI route's ``responses``. ``kinds``: the pydantic model or the media types that the route returns."""
    if isinstance(kinds[0], str):
        return {status: {"content": {each: {} for each in kinds}}}
    return {status: {"model": kinds[0]}}


def list_of(*models: type[BaseModel], **more: Any) -> dict[int | str, dict[str, Any]]:
    """Return a FastAPI route's ``responses`` for a list. ``models``: the types of its items. ``more``: further fields."""
    kinds: Any = reduce(or_, models)
    fields: dict[str, Any] = {
        "object": (str, field("list, or digest from GET /v1/digest.")),
        "data": (list[kinds], field("")),
        **more,
    }
    return content(create_model(f"{models[0].__name__}List", __base__=Record, **fields))
