"""Run the head of a cluster, which answers the nodes and saves its state in a file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any
from uuid import uuid4

from pydantic import TypeAdapter, ValidationError

from edgevlm.apps.cluster.director import ClusterState, Director, Fields
from edgevlm.apps.cluster.shared import Shared
from edgevlm.apps.credentials import mask_credentials
from edgevlm.errors import UserError

FILE = "cluster.json"
NEWEST = "head.id"
LOOK_S = 2.0  # seconds between reads of NEWEST; far less than GRACE_S, so that a replaced head stops in time
LOOKING_S = 1.0
STATE = TypeAdapter(ClusterState)


class HeadAway(Exception):
    """Raised when the head does not answer."""


def boot_time() -> float:
    """Return the time since the machine started, in seconds. The time that the machine slept is included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Head:
    """Answers the nodes' calls, one at a time.

    The head's state is in a file in the folder ``where``. If two heads share this folder, only the newer head answers, and the
    older head raises UserError. Raises UserError if the state file cannot be read or written.
    """

    def __init__(self, where: str, clock: Callable[[], float] = boot_time) -> None:
        self._where, self._shared, self._clock = mask_credentials(where), Shared(where), clock
        self._id, self._is_replaced, self._look_at = uuid4().hex, False, -float("inf")
        self._looker = ThreadPoolExecutor(1, "edgevlm-head")  # in a thread: a shared folder that hangs must not delay answers
        self._look: Future[None] | None = None
        self._read()  # an invalid file raises here, before a running head is replaced
        try:
            self._shared.write(NEWEST, self._id.encode())
        except OSError as error:
            raise UserError(f"{self._where}/{NEWEST}: cannot be written ({error.strerror or error})") from None
        self.director = Director(self._read(), self._save, clock())

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the director. Raises UserError."""
        now = self._clock()
        if now >= self._look_at and (self._look is None or self._look.done()):
            self._look_at, self._look = now + LOOK_S, self._looker.submit(self._look_who_is_newest)
            wait([self._look], LOOKING_S)
        self._refuse_if_replaced()
        return getattr(self.director, method)(*arguments, now=now)

    def _look_who_is_newest(self) -> None:
        with suppress(OSError):
            self._is_replaced = self._is_replaced or self._shared.read(NEWEST) != self._id.encode()

    def _refuse_if_replaced(self) -> None:
        if self._is_replaced:
            raise UserError(f"another head was started on {self._where} and took over; stop this head and join the other")

    def _save(self, state: ClusterState) -> None:
        self._look_who_is_newest()
        self._refuse_if_replaced()
        self._shared.write(FILE, STATE.dump_json(state))
        self._look_who_is_newest()
        self._refuse_if_replaced()

    def _read(self) -> ClusterState:
        try:
            state = STATE.validate_python(_upgraded(json.loads(self._shared.read(FILE))))
            for name, node in state.nodes.items():
                if node.name != name:
                    raise ValueError(f"node {name}: the name does not match")
            for name, camera in state.cameras.items():
                if camera.name != name or not {camera.node, camera.moves_to} <= {None, *state.nodes}:
                    raise ValueError(f"camera {name}: the name or the node does not match")
            return state
        except FileNotFoundError:
            return ClusterState()
        except OSError as error:
            raise UserError(f"{self._where}/{FILE}: cannot be read ({error.strerror or error})") from None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else repr(error)
            raise UserError(f"{self._where}/{FILE}: is not a head's state ({why}); move it away to start without it") from None


def _upgraded(known: Fields) -> Fields:
    """Convert a state file of edgevlm 0.1. Nodes are removed from the state and must join again."""
    if "director" not in known:
        return known
    director, forgot, cameras = known["director"], known["forgotten"], {}
    for each in director["cameras"]:
        name, epochs = each["camera"]["name"], {key: each[key] for key in ("epoch", "begins")}
        cameras[name] = {"name": name, **known["given"][name], **epochs}
    more = {"cameras": cameras, "nodes_forgot": forgot["nodes"], "cameras_forgot": forgot["cameras"]}
    return {**known, **more, "removed": director["removed"]}
