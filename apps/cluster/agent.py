"""Run a server as a node of a cluster: it opens and closes cameras as the cluster's head orders."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from edgevlm import __version__
from edgevlm.apps.bundles.hub import hub_id
from edgevlm.apps.cluster.director import ASK_S, LEASE_S, Director, Fields, Lease
from edgevlm.apps.cluster.head import HeadAway, boot_time
from edgevlm.apps.cluster.notes import NoteFollower
from edgevlm.apps.cluster.shared import EPOCH, MovingEvents, Shared
from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.planning.formulas import camera_bytes
from edgevlm.apps.planning.plan import PlanRequest, make_plan
from edgevlm.apps.run.clock import Span
from edgevlm.apps.serve.config import CameraSettings, ServeConfig
from edgevlm.apps.serve.service import Hooks, Service, check_client_policy, field
from edgevlm.apps.watches.events import WatchEvent
from edgevlm.apps.watches.watch import Watch
from edgevlm.errors import UserError
from edgevlm.progress import Notify
from edgevlm.runtime.helper_process import call_in_helper
from edgevlm.runtime.settings import AUTO, check_policy, parse_budget

RETRY_S = 30.0  # seconds until a camera that failed to open is tried again
DRAIN_S = 20.0
HUB_S = 30.0  # seconds until the hub is asked again for a missing model
RESOLVE = "edgevlm.apps.bundles.fetch:resolve_config"
NOTHING = (0, 0, 0.0)
Planned = tuple[int, int, float]  # a model's bytes without cameras, bytes per camera, and frames per second
Call = Callable[..., Any]


class NodeAgent(Hooks):
    """Applies the head's orders to a service, in separate threads, from :meth:`start` to :meth:`close`.

    With each answer, the head allows the node to watch certain cameras for some seconds. A node that was frozen or cut off
    stops watching, because its cameras may have moved to another node. Each time a camera moves, its new node copies the
    camera's folder in the shared storage. Anything that the old node writes to the old folder after the copy is ignored.

    ``call``: calls a method of the head, and raises HeadAway or the UserError that the head raises.
    """

    def __init__(
        self,
        service: Service,
        call: Call,
        name: str,
        url: str,
        shared: Shared,
        memory_bytes: int,
        notify: Notify,
        clock: Callable[[], float] = boot_time,
    ) -> None:
        self.name, self.url, self._shared, self._memory = name, url, shared, memory_bytes
        self._service, self.call, self._notify, self._clock = service, call, notify, clock
        self.instance, self._lease = uuid4().hex, Lease()
        self.needs: dict[str, Planned] = {}
        self.epochs: dict[str, int] = {}  # epochs of cameras that are open, opening or closing
        self.problems: dict[str, str] = {}
        self.moves: dict[str, dict[str, Any]] = {}  # the snapshot's time and the seconds lost, for each camera that moved here
        self.view: Fields = Director().told
        self._mark = ""  # identifies the newest view received from the head
        self._events: dict[str, MovingEvents] = {}
        self._retry: dict[str, float] = {}
        self._refused: list[str] = []  # messages about watches that were already printed
        self._fetching: set[str] = set()
        self._joined, self._told, self._asking = False, "", threading.Lock()
        self.notes = NoteFollower(name, service, shared, self._events, lambda: self.view, notify)
        self._following = threading.RLock()  # a lock for the watches; _working is for the cameras
        self._working = threading.RLock()
        self._wake, self._done = threading.Event(), threading.Event()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._ask_on, self._work_on)]
        self._local = service.state / "pictures"  # folder for thumbnails if the snapshots are not in a folder
        service.hooks = self

    def start(self) -> None:
        """Start the threads. The service must be open and must not have cameras yet."""
        if self._local.is_symlink():
            self._local.unlink()
        shutil.rmtree(self._local, ignore_errors=True)  # delete an earlier process's thumbnails
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Wait up to DRAIN_S seconds for cameras to move to other nodes, close the remaining cameras, and leave the cluster."""
        with suppress(HeadAway, UserError):
            self.call("leave", self.name, self.instance)
            end = time.monotonic() + DRAIN_S
            while self.epochs and self._is_moving() and time.monotonic() < end:
                time.sleep(0.1)
        self._done.set()
        self._wake.set()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        for camera in list(self.epochs):
            self._close(camera)
        self.notes.follow()
        with suppress(HeadAway, UserError):
            self.call("gone", self.name, self.instance)

    def _is_moving(self) -> bool:
        self.ask()
        return any(self.view["cameras"].get(name, {}).get("moves_to") for name in self.epochs)

    def ask(self) -> None:
        """Ask the head for orders, after joining the cluster if necessary. Raises HeadAway and UserError."""
        with self._asking:
            asked, notes = self._clock(), self.notes
            try:
                if not self._joined:
                    self._join()
                open = sorted({*self.epochs, *self._lease.orders})  # orders include cameras that are about to be opened
                followed = notes.kept, dict(notes.cameras)
                told = self.call("ask", self.name, self.instance, open, dict(self.needs), *followed, self._mark)
            except UserError:  # the head treats this node as lost, so the lease is void
                self._joined, self._lease = False, Lease()
                raise
            self._lease.renew(asked, told["orders"])
            self.view, self._mark = told["view"] or self.view, told["mark"]
            for model in told["unknown"]:
                self._learn(model)
        self._wake.set()

    def _join(self) -> None:
        config, about = self._service.config, {"memory_bytes": self._memory, "url": self.url}
        watches = {watch.name: watch.model_dump(mode="json") for watch in config.watches}
        for line in self.call("join", self.name, self.instance, about, self._asked_for(config), watches, __version__):
            self._notify(mask_credentials(line))
        self._joined = True
        self._notify(f"cluster: {self.name} has joined")

    def _asked_for(self, config: ServeConfig) -> dict[str, Fields]:
        return {name: self.asked_for(settings, config) for name, settings in config.cameras.items()}

    def asked_for(self, settings: CameraSettings, config: ServeConfig | None = None, by_client: bool = False) -> Fields:
        """Describe a camera for the head. A device (such as ``0``) or a file can be watched only by this node."""
        whole = (config or self._service.config).camera(settings)
        source = whole.address()
        anywhere = source == "demo" or re.match(r"(?!file:)[a-z]+://", source, re.IGNORECASE)
        return {
            "settings": whole.model_dump(exclude_none=True), "model": whole.model or "demo", "fps": whole.fps,
            "only": None if anywhere else self.name, "by_client": by_client,
        }  # fmt: skip

    def heard(self) -> dict[str, float]:
        with suppress(HeadAway, UserError):
            return {} if self._told else dict(self.call("heard"))
        return {}

    def _ask_on(self) -> None:
        while not self._done.is_set():
            try:
                self.ask()
                self._tell_once("")
            except HeadAway as error:
                self._tell_once(
                    f"the head does not answer ({error}); cameras are watched for {LEASE_S:g} s after its last answer"
                )
            except UserError as error:
                self._tell_once(str(error))
            except Exception as error:  # keep asking: the next request may succeed
                self._tell_once(f"unexpected {type(error).__name__}: {mask_credentials(str(error))}")
            self._done.wait(ASK_S)

    def _tell_once(self, line: str) -> None:
        if line != self._told:
            self._notify(f"cluster: {line or 'the head answers again'}")
        self._told = line

    def _learn(self, model: str) -> None:
        if hub_id(model) is None:
            self.needs[model] = self.plan(model)
        elif model not in self._fetching:
            self._fetching.add(model)
            threading.Thread(target=self._fetch, args=(model,), daemon=True).start()

    def _fetch(self, model: str) -> None:
        told = ""
        while not self._done.is_set():
            try:
                folder = str(call_in_helper(RESOLVE, model, progress=lambda *done: None, notify=self._notify))
            except UserError as error:
                if str(error) != told:
                    told = str(error)
                    self._notify(told)
                self.needs[model] = NOTHING
                self._done.wait(HUB_S)
            else:
                self.needs[model] = self.plan(folder)
                return

    def plan(self, model: str) -> Planned:
        """Predict a local model's memory and speed. If the model cannot run, print the reason and return NOTHING."""
        config = self._service.config
        budget = None if config.budget is None else parse_budget(str(config.budget))
        try:
            plan = make_plan(PlanRequest(model, budget=budget, fps=config.fps, cameras=1))
        except UserError as error:
            self._notify(f"{mask_credentials(model)} cannot run on this node: {error}")
            return NOTHING
        camera = camera_bytes(plan.roofline.model, plan.budget, plan.chunk, plan.roofline.kv)
        return max(0, plan.memory.total - camera), camera, plan.speed.prefill_fps

    def _work_on(self) -> None:
        while not self._done.is_set():
            self._wake.wait(1.0)
            self._wake.clear()
            try:
                self.work()
            except Exception as error:  # keep working: the next order may succeed
                self._notify(f"cluster: unexpected {type(error).__name__}: {mask_credentials(str(error))}")

    def work(self) -> None:
        """Close cameras that this node may no longer watch, open cameras that it must watch, and update the watches."""
        with self._working, self._service.watches.held():
            view = self.view
            held = self._lease.held(self._clock())  # read the lease after the view: the lease must not be older
            for name, epoch in list(self.epochs.items()):
                if held.get(name) != epoch:
                    self._close(name)
            self._follow()
            self.notes.follow()
            for name, epoch in held.items():
                if self._done.is_set():
                    return
                is_due = name not in self.epochs and time.monotonic() >= self._retry.get(name, 0.0) and name in view["cameras"]
                if (
                    is_due and self._lease.held(self._clock()).get(name) == epoch
                ):  # opening other cameras may have outlasted the lease
                    self._open(name, epoch, view["cameras"][name])
            for name, stream in list(self._service.streams.items()):
                if self._events[name].events:
                    self._events[name].note_sent(self._service.delivery.store)
                if name in self.moves and self.moves[name]["lost_s"] is None and stream.loop.frame is not None:
                    self._say_lost(name)

    def _open(self, name: str, epoch: int, given: Fields) -> None:
        self.epochs[name] = epoch
        try:
            before = self._begin_folder(name, epoch, given["begins"])
            self.notes.follow_at(name, epoch)
            self._events[name] = MovingEvents(self._shared, name, epoch, self._notify)
            self._tell_again(name)
            settings = CameraSettings(**{**given["settings"], **given["switched"]})
            self._service.add(name, settings, given["by_client"], given["paused"])
            self._pause_watches(name, given["paused_watches"])
        except (UserError, OSError) as error:
            self.problems[name] = mask_credentials(str(error))
            self._retry[name] = time.monotonic() + RETRY_S
            if epoch == given["begins"]:  # the epoch's folder holds no data yet
                self._shared.delete(name, epoch)
            self.epochs.pop(name, None)
            self._notify(f"{name}: {self.problems[name]}")
            return
        for each in before:
            self._shared.delete(name, each)
        self.problems.pop(name, None)
        if epoch > 1 and epoch != given["begins"]:
            self.moves[name] = {"from_time": self._service.stream(name).resumed_at, "lost_s": None}

    def _begin_folder(self, name: str, epoch: int, begins: int) -> list[int]:
        shutil.rmtree(self._local / name, ignore_errors=True)
        known = self._shared.epochs(name)
        before = [each for each in known if each < epoch]
        self._shared.begin(name, epoch, max((each for each in before if each >= begins), default=None))
        if epoch not in known and begins == epoch and before:  # if the memory was emptied, watches keep their state
            with suppress(FileNotFoundError):
                events = self._shared.read(f"{name}/{EPOCH}{before[-1]}/{MovingEvents.FILE}")
                self._shared.write(f"{name}/{EPOCH}{epoch}/{MovingEvents.FILE}", events)
        return [each for each in self._shared.epochs(name, unfinished=True) if each < epoch]

    def _tell_again(self, name: str) -> None:
        for event, unsent in self._events[name].events:
            watch = self._service.watches.watches.get(event.watch)
            sinks = (watch.sinks or None) if unsent and watch is not None and watch.on in (event.state, "both") else ()
            self._service.delivery.record(event, (), sinks)

    def _say_lost(self, name: str) -> None:
        since, stream = self.moves[name]["from_time"], self._service.stream(name)
        if since is None:
            stream.notice("now watched by this node, with an empty memory: no snapshot was found")
            self.moves.pop(name)
        else:
            self.moves[name]["lost_s"] = round(max(0.0, time.time() - since), 1)
            stream.notice(f"now watched by this node; the last {self.moves[name]['lost_s']:.1f} s are missing from memory")

    def _close(self, name: str) -> None:
        if name in self._service.streams:
            self._service.remove(name)
            with suppress(OSError):  # this node was frozen or cut off: delete its late writes
                if any(each > self.epochs[name] for each in self._shared.epochs(name)):
                    self._shared.delete(name, self.epochs[name])
            self.notes.note_closed(name, self.epochs[name])
        shutil.rmtree(self._local / name, ignore_errors=True)
        for known in (self.epochs, self.moves, self.problems, self._retry, self._events):
            known.pop(name, None)

    def describe(self, name: str) -> Fields:
        """Return the answer to ``GET /v1/streams/{name}`` for a camera of this node."""
        lost = self.moves.get(name, {}).get("lost_s")
        return {**self._service.stream(name).describe(), "node": self.name, "epoch": self.epochs.get(name), "lost_s": lost}

    def change(self, name: str, policy: str | None, budget: str | int | None, paused: bool | None) -> None:
        """Pause or resume a camera, or change its policy or budget. A new policy or budget empties the memory.

        A setting that is None is left unchanged. The change still applies after the camera moves to another node. After
        HeadAway or UserError, the camera continues as before. Raises FieldError for a policy that clients may not name.
        """
        change = {key: value for key, value in (("policy", policy), ("budget", budget)) if value is not None}
        if change:
            check_client_policy(policy)
            with field("policy"):
                check_policy(policy or AUTO)
            with self._working:
                before = self.view["cameras"][name]
                self._open_again(name, {**before["switched"], **change})
                if name not in self.epochs:
                    why = self.problems.get(name, "another node may be watching the camera")
                    self._open_again(name, before["switched"], before["begins"])
                    raise UserError(why)
        if paused is not None:
            self.call("change", name, {"paused": paused})
            stream = self._service.stream(name)
            (stream.pause if paused else stream.resume)()

    def _open_again(self, name: str, switched: Fields, begins: int | None = None) -> None:
        self.call("change", name, {"switched": switched}, begins)
        self._retry.pop(name, None)
        self.ask()
        self.work()

    def cameras_elsewhere(self) -> Collection[str]:
        return self.view["cameras"].keys()

    def may_watch(self, name: str) -> bool:
        """Return whether this node is currently allowed to watch the camera."""
        epoch = self._lease.held(self._clock()).get(name)
        return epoch is not None and self.epochs.get(name) == epoch

    def may_record(self, event: WatchEvent) -> bool:
        """Return whether this node may record an event. If so, also store the event for the camera's next node."""
        may = self.may_watch(event.camera)
        if may:
            self._events[event.camera].add(event)
        return may

    def camera_folder(self, service: Service, name: str) -> Path:
        where = self._where(name)
        return where if isinstance(where, Path) else self._local / name

    def camera_address(self, service: Service, name: str) -> str | None:
        where = self._where(name)
        return where if isinstance(where, str) else None

    def _where(self, name: str) -> str | Path | None:
        return None if name not in self.epochs else self._shared.where(name, self.epochs[name])

    def replace_cameras(self, service: Service, before: ServeConfig, config: ServeConfig) -> list[str]:
        """Update the cluster after cameras changed in this node's configuration. Return a line for each change."""
        old, new, cameras = self._asked_for(before), self._asked_for(config), self.view["cameras"]

        def replace(name: str) -> str:
            is_replaced = name in cameras and name in old
            if is_replaced:
                self.call("remove", name)
            if name in new:
                self.call("add", name, new[name])
            return "removed" if name not in new else "reopened" if is_replaced else "added"

        return self._replaced("", old, new, cameras, replace)

    def replace_watches(self, service: Service, before: Iterable[Watch], after: Iterable[Watch]) -> list[str]:
        old, new = ({each.name: each.model_dump(mode="json") for each in watches} for watches in (before, after))

        def replace(name: str) -> str:
            self.call("watch", name, new.get(name))
            return "set on all nodes" if name in new else "removed"

        return self._replaced("watch ", old, new, self.view["watches"], replace)

    def _replaced(
        self, kind: str, old: Fields, new: Fields, known: Collection[str], replace: Callable[[str], str]
    ) -> list[str]:
        done = []
        for name in {**old, **new}:
            if old.get(name) != new.get(name) or (name in new and name not in known):
                try:
                    done.append(f"{kind}{name}: {replace(name)}")
                except (UserError, HeadAway) as error:
                    done.append(f"{kind}{name}: {mask_credentials(str(error))}")
        self._wake.set()
        return done

    def add_watch(self, watch: Watch) -> None:
        """Add a watch on all nodes. Raises HeadAway, and the same FieldError as :meth:`Watches.add`."""
        with self._following:
            self._service.watches.add(watch)
            self.call("watch", watch.name, watch.model_dump(mode="json"))
            self.ask()

    def remove_watch(self, name: str) -> None:
        """Remove a watch from all nodes. Raises HeadAway, and UserError for an unknown watch."""
        with self._following:
            self._service.watches.remove(name)
            self.call("watch", name, None)
            self.ask()

    def pause_watch(self, name: str, paused: bool, camera: str | None) -> None:
        """Pause or resume a watch on one or all of its cameras, on any node. Raises UserError and HeadAway."""
        cameras = self._service.watches.watch(name).cameras or list(self.view["cameras"])
        self.call("pause_watch", name, paused, [each for each in cameras if camera in (None, each)])
        self.follow()

    def follow(self) -> None:
        """Ask the head for orders, and apply the cluster's watches to this node. Raises HeadAway and UserError."""
        self.ask()
        self._follow()

    def _follow(self) -> None:
        with self._following:
            wanted = [Watch.model_validate(each) for each in self.view["watches"].values()]
            asked = list(self._service.watches.watches.values())
            if self._joined and wanted != asked:
                lines = self._service.watches.replace(asked, wanted)
                for line in lines:
                    if line not in self._refused:
                        self._notify(line)
                self._refused = lines
            for name in list(self._service.streams):
                if name in self.view["cameras"]:
                    self._pause_watches(name, self.view["cameras"][name]["paused_watches"])

    def _pause_watches(self, name: str, paused: Sequence[str]) -> None:
        for watch, state in self._service.stream(name).watcher.states().items():
            if state["paused"] != (watch in paused):
                self._service.watches.pause(watch, watch in paused, name)

    def forget(self, camera: str | None, span: Span) -> int:
        """Make all nodes forget what one or all cameras saw in a period. Return the forget request's number.

        Absent nodes carry out the request when they return. Raises HeadAway, and UserError for a camera that never existed.
        """
        since, until = span.open_ended
        now = time.time()
        number = int(self.call("forget", camera, since, now if until is None else min(until, now), span.everything))
        self.follow_notes(number)
        return number

    def follow_notes(self, number: int) -> Fields:
        """Carry out all requests to forget. Raises UserError and HeadAway.

        Returns what request ``number`` deleted on this node, and why it failed, if it did.
        """
        with self._working:
            self.ask()
            self.work()
            self.ask()
            return self.notes.answer(number)

    def forget_shared(self, number: int) -> tuple[Fields, list[str]]:
        """Carry out a request to forget, in the shared folders of cameras that are open on no node.

        Returns what was deleted, the failures, and the names of absent nodes and closed cameras that must still delete their
        data. Raises UserError and HeadAway.
        """
        with self._working:
            self.notes.follow_shared(number)
            self.ask()
            return self.notes.answer(number), self.notes.waits_for(number)
