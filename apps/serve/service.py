"""Models and the cameras they watch: what a server serves, without HTTP."""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from edgevlm.apps.bundles.resolve import resolve_model
from edgevlm.apps.credentials import mask_credentials, secret, state_key
from edgevlm.apps.forget import Forgotten, Span, cameras, forget_camera
from edgevlm.apps.journal import Journal, Line
from edgevlm.apps.run.thumbnails import as_jpeg
from edgevlm.apps.serve.config import CameraSettings, ServeConfig, as_far_as_running, server_key
from edgevlm.apps.serve.journal import JournalWriter
from edgevlm.apps.serve.stream import CameraStream, stream_options
from edgevlm.apps.sources import SourceOptions, check_source, open_source
from edgevlm.apps.sources.hosts import AllowedHosts
from edgevlm.apps.sources.network import split_address
from edgevlm.apps.watches.delivery import Delivery
from edgevlm.apps.watches.events import MOST, EventStore, WatchEvent
from edgevlm.apps.watches.sinks import Sink, open_sinks
from edgevlm.apps.watches.watch import Watch
from edgevlm.apps.watches.watcher import Watcher
from edgevlm.apps.watches.watches import Watches
from edgevlm.engines.power import find_meter
from edgevlm.engines.power.energy import Energy
from edgevlm.errors import FieldError, UserError, nearest
from edgevlm.progress import Notify, progress
from edgevlm.runtime.model import Model
from edgevlm.runtime.plugins import is_file, names
from edgevlm.runtime.policies import POLICIES
from edgevlm.runtime.settings import AUTO, check_policy

MAX_STREAMS = 256
TEST_S = 10.0  # that a source which is tested may take to give its first picture
LOOK_S = 2.0  # that it is looked at then
TEST_FPS = 100  # frames a second, and in all, that are looked at
CLOSING_S = 30.0  # that the last snapshots may take
TOLD_BYTES = 16 << 20  # of snapshots that take long enough to be told of
REOPENED = 5  # times in an hour that a camera with a torn memory is opened again
REOPEN_S = 15.0  # from the first time to the second; twice as long from each to the next
OVERLOADED, RELIEVED = 0.1, 0.02  # skipped of the frames that cameras give: said above the one, taken back below the other
CLIENTS_ADD = r"demo|\d{1,3}|(?i:rtsps?|rtmps?|https?)://\S+"  # no file, no pipeline, no program


@contextmanager
def field(name: str) -> Iterator[None]:
    """UserErrors name this field."""
    try:
        yield
    except UserError as error:
        raise FieldError(name, str(error)) from None


def check_client_policy(policy: str | None) -> None:
    """Raise FieldError for a policy that clients may not name: one in a file is a program."""
    if policy is not None and policy.partition(":")[0] not in (AUTO, *POLICIES, *names("policies")):
        raise FieldError("policy", "there is no such policy; GET /v1/policies lists them")


class Hooks:
    """What a service asks, and what stands in for it, where it is part of something larger: a node of a cluster."""

    def camera_folder(self, service: Service, name: str) -> Path:
        """Return the folder of a camera's pictures, and of its snapshots unless they have an address."""
        return service.state / name

    def camera_address(self, service: Service, name: str) -> str | None:
        """Return where a camera's snapshots go, if not to its folder."""
        snapshots = service.config.snapshots
        return None if snapshots is None else f"{snapshots.rstrip('/')}/{name}"

    def may_watch(self, name: str) -> bool:
        """Whether a camera's next frame may be watched."""
        return True

    def may_record(self, event: WatchEvent) -> bool:
        """Whether an event may be recorded."""
        return True

    def cameras_elsewhere(self) -> Collection[str]:
        """Return the cameras that others watch."""
        return ()

    def replace_cameras(self, service: Service, before: ServeConfig, config: ServeConfig) -> list[str]:
        """Watch what another configuration names; returns what was done, a line each."""
        return service.replace_cameras(before, config)

    def replace_watches(self, service: Service, before: Iterable[Watch], after: Iterable[Watch]) -> list[str]:
        """Ask another configuration's watches; returns what was done, a line each."""
        return service.watches.replace(before, after)


class Service:
    """The streams of a configuration, by name. Weights are loaded once for each model. Any thread may call any method.

    key: that clients have to give, None where none is asked for. watches: on all streams. options: of sources. sinks: beside
    those of the configuration.
    """

    def __init__(
        self,
        config: ServeConfig,
        notify: Notify,
        options: SourceOptions | None = None,
        sinks: Mapping[str, Sink] | None = None,
    ) -> None:
        """Raises UserError for keys that are none."""
        self.config, self.key = config, server_key(config.server)
        self.streams: dict[str, CameraStream] = {}
        self._models: dict[str, Model] = {}
        self._overloaded: set[str] = set()  # models
        self._reopened: dict[str, list[float]] = {}  # when cameras with a torn memory were opened again
        self._notify, self._lock = notify, threading.RLock()
        self.power = Power()
        self._delivery: Delivery | None = None
        self._journal: Journal | None = None
        self.state = Path(config.state) if config.state else state_folder()
        self._state_key = state_key(config.state_key)
        self._options, self._sinks = options or SourceOptions(), sinks or {}
        self.hooks = Hooks()  # replaced before the service is opened
        self.watches = Watches(self._watchers, lambda: self.delivery, notify, lambda: self.hooks)

    def open(self) -> None:
        """Open sinks, all cameras and watches. Raises UserError for the first that cannot be, and closes the others."""
        try:
            if self.config.sinks or self._sinks:
                _ = self.delivery
            for name, settings in self.config.cameras.items():
                self.add(name, settings)
            for watch in self.config.watches:
                self.watches.add(watch)
        except BaseException:
            self.close()
            raise

    def add(self, name: str, settings: CameraSettings, by_client: bool = False, paused: bool = False) -> CameraStream:
        """Open a camera and watch it, unless ``paused``. Raises UserError for what cannot be opened, and changes nothing.

        by_client: a client names source and policy. Raises FieldError for what clients may not name.
        """
        hosts = None
        if by_client:
            hosts = self.check_client(settings)
        with self._lock:
            if name in self.streams:
                raise FieldError("id", f"there is a stream {name} already; remove it first, or choose another name")
            if len(self.streams) >= MAX_STREAMS:
                raise UserError(f"there are {MAX_STREAMS} streams already; remove one first")
            wanted = self.config.camera(settings)
            address = secret(wanted.source)
            if address == "-":
                raise UserError(f"stream {name}: a service does not read its stdin; give a camera or an address")
            with field("source"):
                check_source(address, None)
            with field("policy"):
                check_policy(wanted.policy or "auto")
            return self._open(name, wanted, self.hooks.camera_folder(self, name), hosts, paused)

    def switch(self, name: str, policy: str | None, budget: str | int | None) -> CameraStream:
        """Go on with another policy or budget, None for what it has, and an empty memory, until the server restarts.

        That memory is not on the disk; the snapshots of before stay for the restart. Raises UserError, and the stream goes on
        from those, or is removed where its camera cannot be opened again; FieldError for a policy that clients may not name.
        """
        check_client_policy(policy)
        with self._lock:
            before = self.stream(name)
            change = {key: value for key, value in (("policy", policy), ("budget", budget)) if value is not None}
            wanted = before.settings.model_copy(update=change)
            with field("policy"):
                check_policy(wanted.policy or "auto")
            before.close()
            try:
                return self._open(name, wanted, None, before.hosts, before.paused)
            except BaseException as error:
                try:
                    self._open(name, before.settings, before.folder, before.hosts, before.paused)
                except UserError as again:
                    self.remove(name)
                    raise UserError(f"{error}; nor could {name} be opened again as it was ({again}): add it again") from None
                raise

    def forget(self, name: str | None, span: Span) -> dict[str, Forgotten]:
        """Delete what was seen then by a camera, or by all, removed ones too; by camera, how many of what.

        All of it begins an empty memory. Raises UserError, and what was deleted until then stays deleted.
        """
        with self._lock:
            removed = {each: path for each, path in self.removed().items() if name in (None, each)}
            watched = list(self.streams) if name is None else [] if removed else [self.stream(name).name]
            done = {each: self._forget_all(each) if span.everything else self.stream(each).forget(span) for each in watched}
            for each, counts in self.forget_kept(name, span).items():
                done[each] = {**done.get(each, {}), **counts}
            return done

    def forget_kept(self, name: str | None, span: Span) -> dict[str, Forgotten]:
        """As :meth:`forget`, of what is kept beside the memories of cameras that are watched."""
        with self._lock:
            done: dict[str, Forgotten] = {}
            for each, path in self.removed().items():
                if name in (None, each):
                    done[each] = self.forget_at(path, span)
                    if (address := self.hooks.camera_address(self, each)) is not None:
                        done[each] |= self.forget_at(address, span)
            if self.has_events or (self.state / EventStore.FILE).exists():
                done.setdefault(name or "", {})["events"] = self.delivery.store.delete(name, span.since, span.until)
            if self.journal is not None:
                done.setdefault(name or "", {})["journal"] = self.journal.delete(name, span.since, span.until)
            return done

    def forget_at(self, where: str | Path, span: Span) -> Forgotten:
        """Of a camera's folder, or address, that nothing uses. Raises UserError."""
        return forget_camera(where, span, self._state_key)

    def removed(self) -> dict[str, Path]:
        """Cameras that are not watched any more and of which something is kept, with their folders."""
        return {name: path for path, name in cameras(self.state) if name not in self.streams}

    def _forget_all(self, name: str) -> Forgotten:
        before = self.stream(name)
        count = len(before.observer.thumbnails.taken())
        before.close()
        folder = self.hooks.camera_folder(self, name)
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            raise UserError(f"{folder}: cannot be deleted; delete it yourself, then restart")
        if (address := self.hooks.camera_address(self, name)) is not None:
            forget_camera(address, Span(), self._state_key)
        self._open(name, before.settings, before.folder, before.hosts, before.paused)
        return {"thumbnails": count}

    def check_client(self, settings: CameraSettings) -> AllowedHosts | None:
        """The hosts that a client's camera may reach; None for any. Raises FieldError for what clients may not name."""
        check_client_policy(settings.policy)
        return self._client_hosts(settings.source)

    def _client_hosts(self, source: str) -> AllowedHosts | None:
        """The hosts that the source may reach; None for any. Raises FieldError."""
        server = self.config.server
        if source.startswith(("env:", "file:")) or is_file(source):
            raise FieldError("source", "secrets and programs are named in the configuration alone")
        if source == "-":
            raise FieldError("source", "a server does not watch its own standard input")
        if server.any_source:
            return None
        if not re.fullmatch(CLIENTS_ADD, source):
            what = "give demo, an index like 0, or an address (rtsp, rtmp, http)"
            raise FieldError("source", f"{what}; the operator can allow others with server.any_source")
        hosts = AllowedHosts(server.source_hosts)
        if "://" in source:
            with field("source"):
                parts = split_address(source)
                hosts.resolve(parts.hostname or "", parts.port or 0)
        return hosts

    def remove(self, name: str) -> None:
        """Stop watching a camera; its snapshots stay. Raises UserError for a stream that there is not."""
        with self._lock:
            self._remove(name)
            self._close_unused_models()

    def _remove(self, name: str) -> None:
        stream = self.stream(name)
        self.streams = {key: value for key, value in self.streams.items() if key != name}
        stream.close()

    def _close_unused_models(self) -> None:
        used = {stream.model for stream in self.streams.values()}
        for key in [key for key, model in self._models.items() if model not in used]:
            self._models.pop(key).close()
            self._overloaded.discard(key)

    def reload(self, config: ServeConfig) -> list[str]:
        """Apply a configuration: cameras that changed are opened again, others, switched ones too, are not touched.

        What was done, a line each, and what waits for a restart; a camera that cannot be opened is one of them and holds up no
        other. Raises UserError for an invalid key, and changes nothing.
        """
        with self._lock:
            before, (config, done) = self.config, as_far_as_running(self.config, config)
            self.key, self.config = server_key(config.server), config
            done += self.hooks.replace_cameras(self, before, config)
            self._close_unused_models()
            if config.sinks != before.sinks:
                try:
                    self.delivery.replace({**open_sinks(config.sinks), **self._sinks})
                    done.append("sinks: opened again")
                except UserError as error:
                    done.append(mask_credentials(str(error)))
            return done + self.hooks.replace_watches(self, before.watches, config.watches)

    def replace_cameras(self, before: ServeConfig, config: ServeConfig) -> list[str]:
        """Watch what another configuration names; what was done, a line each."""
        done = []
        for name in list(self.streams):
            if name in before.cameras and name not in config.cameras:
                self._remove(name)
                done.append(f"{name}: removed")
        for name, settings in config.cameras.items():
            running, wanted = self.streams.get(name), config.camera(settings)
            configured = before.camera(before.cameras[name]) if name in before.cameras else None
            if running is not None and wanted == (configured if running.folder is None else running.settings):
                continue
            try:
                if running is not None:
                    self._remove(name)
                self.add(name, settings)
                done.append(f"{name}: {'opened again' if running else 'added'}")
            except UserError as error:
                done.append(f"{name}: {mask_credentials(str(error))}")
        return done

    @property
    def delivery(self) -> Delivery:
        """Events and the sinks that they are sent to; opened when it is first asked for. Raises UserError."""
        if self._delivery is None:
            with self._lock:
                if self._delivery is None:
                    sinks, kept = {**open_sinks(self.config.sinks), **self._sinks}, self.config.events
                    store = EventStore(self.state, self._notify, days=kept.days, cap=kept.megabytes << 20)
                    self._delivery = Delivery(store, sinks, self._notify, self.watches.control)
        return self._delivery

    def _watchers(self) -> dict[str, Watcher]:
        return {name: stream.watcher for name, stream in self.streams.items()}

    @property
    def journal(self) -> Journal | None:
        """What cameras have written in words; None where there is none. Raises UserError."""
        kept = self.config.journal
        if self._journal is None and (kept.every or (self.state / Journal.FILE).exists()):
            with self._lock:
                if self._journal is None:
                    self._journal = Journal(self.state, self._notify, days=kept.days, cap=kept.megabytes << 20)
        return self._journal

    def lines(self, **query: Any) -> list[Line]:
        """Lines that :meth:`Journal.query` finds; of their evidence ``jpeg_url`` where the thumbnail is still kept."""

        def pictured(camera: str, seen: Mapping[str, Any]) -> dict[str, Any]:
            kept = camera in self.streams and self.streams[camera].has_picture(seen["frame"], seen["time"])
            return {**seen, "jpeg_url": seen["jpeg_url"] if kept else None}

        found = [] if self.journal is None else self.journal.query(**query)
        return [replace(line, evidence=[pictured(line.camera, seen) for seen in line.evidence]) for line in found]

    def digest(self, since: float, until: float, camera: str | None = None, search: str | None = None) -> list[dict[str, Any]]:
        """What happened then, by time, as ``GET /v1/digest`` tells: when watches were open, and lines of the journal."""
        opened = self.delivery.store.openings(since, until, camera, search)
        written = self.lines(search=search, since=since, until=until, camera=camera, limit=MOST)
        told = [(each.event.opened, {"event": "opening", **each.json()}) for each in opened]
        told += [(line.time, {"event": "line", **line.json()}) for line in written]
        return [fields for _, fields in sorted(told, key=itemgetter(0))]

    @property
    def has_events(self) -> bool:
        """Whether :attr:`delivery` is open."""
        return self._delivery is not None

    def stream(self, name: str | None) -> CameraStream:
        """A stream by name; the only one where no name is given. Raises UserError."""
        if name is None:
            if len(self.streams) == 1:
                return next(iter(self.streams.values()))
            raise UserError(f"which stream? there are: {', '.join(self.streams) or 'none'}")
        if name not in self.streams:
            raise UserError(f"there is no stream {name!r}; {nearest(name, self.streams)}")
        return self.streams[name]

    def signs_of_life(self) -> dict[str, tuple[int, int]]:
        """Of each watched stream, its own signs and its model's work: while it gets on or waits for others, one changes."""
        streams, steps = self.streams, Counter[Model]()
        for stream in streams.values():
            steps[stream.model] += stream.session.stats.frames + stream.pieces
        return {name: (each.signs.count, steps[each.model]) for name, each in streams.items() if each.is_watched}

    def report_load(self) -> None:
        """Say on stderr and to the listeners of its streams when a model falls behind its cameras, and when no longer."""
        for name, model in list(self._models.items()):
            streams = [stream for stream in self.streams.values() if stream.model is model]
            rates = [stream.rates() for stream in streams]
            watched, skipped = sum(rate[0] for rate in rates), sum(rate[1] for rate in rates)
            given = watched + skipped
            if not given:  # no camera is there: nobody knows
                continue
            if skipped > OVERLOADED * given and name not in self._overloaded:
                self._overloaded.add(name)
                line = (
                    f"overloaded: of {given:.1f} frames a second {watched:.1f} are watched; each camera skips the same "
                    "fraction. Lower fps, watch fewer cameras or take a smaller model"
                )
            elif skipped <= RELIEVED * given and name in self._overloaded:
                self._overloaded.discard(name)
                line = "no longer overloaded: all frames are watched"
            else:
                continue
            self._notify(f"{mask_credentials(name)}: {line}")
            for stream in streams:
                stream.events.send("notice", {"text": line})

    def reopen_torn(self) -> None:
        """Open cameras again whose memory an error has torn, from their last snapshots, ever more rarely. Returns at once."""
        now = time.monotonic()
        for stream in self.streams.values():
            if not stream.session.is_torn:
                continue
            before = [each for each in self._reopened.get(stream.name, ()) if each > now - 3600]
            if len(before) < REOPENED and (not before or now > before[-1] + REOPEN_S * 2 ** len(before) / 2):
                self._reopened[stream.name] = [*before, now]
                threading.Thread(target=self._reopen, args=(stream,), name="edgevlm-reopen", daemon=True).start()

    def _reopen(self, torn: CameraStream) -> None:
        with self._lock:
            if self.streams.get(torn.name) is not torn:
                return
            torn.notice("an error has left the memory half changed; going on from the last snapshot")
            torn.close()
            torn.problem = torn.problem or "its memory is opened again"
            try:
                self._open(torn.name, torn.settings, torn.folder, torn.hosts, torn.paused)
            except Exception as error:
                torn.problem = mask_credentials(str(error) or type(error).__name__)
                torn.notice(f"cannot go on: {torn.problem}")

    def close(self) -> None:
        """End all streams, each with a last snapshot, at the same time and for CLOSING_S seconds at most; then the models."""
        with self._lock:
            streams, self.streams = self.streams, {}
            size = sum(stream.session.stats.state_bytes for stream in streams.values())
            if size > TOLD_BYTES:
                self._notify(f"writing the last snapshots, {size / 1e6:,.0f} MB, for {CLOSING_S:g} s at most")
            threads = {
                name: threading.Thread(target=stream.close, name="edgevlm-closing", daemon=True)
                for name, stream in streams.items()
            }
            for thread in threads.values():
                thread.start()
            end = time.monotonic() + CLOSING_S
            for thread in threads.values():
                thread.join(max(0.0, end - time.monotonic()))
            if self._delivery is not None:
                self._delivery.close()
                self._delivery.store.close()
            if self._journal is not None:
                self._journal.close()
            if late := [name for name, thread in threads.items() if thread.is_alive()]:
                self._notify(f"{', '.join(late)}: not closed within {CLOSING_S:g} s; the snapshot before the last one stays")
                return
            for model in self._models.values():
                model.close()
            self._models.clear()

    def test(self, source: str) -> dict[str, Any]:
        """Open a source, look at it for a moment, and close it: size, frames a second, milliseconds to the first frame, a JPEG.

        Raises UserError, with the reason where it gives no picture; FieldError for a source that clients may not add.
        """
        options = SourceOptions(fps=TEST_FPS, open_timeout_s=TEST_S, read_timeout_s=TEST_S, hosts=self._client_hosts(source))
        began = time.monotonic()
        with field("source"):
            opened = open_source(source, None, options)
        giving_up = threading.Timer(TEST_S, opened.interrupt)
        giving_up.start()
        try:
            first = opened.read()
            if first is None:
                raise UserError(f"it was opened, but no picture came within {TEST_S:g} s")
            frame, first_s, frames = first, time.monotonic() - began, 1
            while frames < TEST_FPS and time.monotonic() - began < first_s + LOOK_S and (more := opened.read()) is not None:
                frame, frames = more, frames + 1
        finally:
            giving_up.cancel()
            opened.close()
        span = frame.time_s - first.time_s
        height, width = frame.image.shape[:2]
        return {
            "object": "stream.test", "width": width, "height": height, "first_frame_ms": round(1e3 * first_s, 1),
            "fps": round((frames - 1) / span, 2) if span > 0 else None, "jpeg": b64encode(as_jpeg(frame.image)).decode(),
        }  # fmt: skip

    def _open(
        self, name: str, settings: CameraSettings, folder: Path | None, hosts: AllowedHosts | None, paused: bool = False
    ) -> CameraStream:
        """Open a camera with all its settings, and watch it, unless ``paused``, in place of the one of that name."""
        options = stream_options(replace(self._options, hosts=hosts), settings)
        model, config = self._model(settings.model or "demo"), self.config
        stream = CameraStream(
            name, settings, model, options, folder, config, self._notify, self.watches,
            None if folder is None else self.hooks.camera_address(self, name), self._state_key,
        )  # fmt: skip
        if self.journal is not None:
            stream.journal = JournalWriter(stream, self.journal, config.journal)
        stream.paused, stream.may_watch = paused, lambda: self.hooks.may_watch(name)
        self.streams = {**self.streams, name: stream}
        self.watches.attach(stream.watcher)
        stream.start()
        return stream

    def _model(self, name: str) -> Model:
        if name not in self._models:
            with progress("reading the model") as step:
                bundle = resolve_model(name, step, lambda line: self._notify(mask_credentials(line)), self.config.engine)
            with progress("verifying and loading the model"):
                self._models[name] = Model.load(bundle, engine=self.config.engine, threads=self.config.threads)
        return self._models[name]


class Power:
    """The machine's watts, by its own meter."""

    def __init__(self) -> None:
        self._meter, _ = find_meter()
        self._lock, self._energy = threading.Lock(), self._begun()
        self._watts: float | None = None

    def watts(self) -> float | None:
        """The mean since they were asked for before, a second at least; None where nothing is measured."""
        with self._lock:
            if self._energy is not None and time.monotonic() - self._since >= 1.0:
                self._energy.sample()
                self._watts, self._energy = self._energy.watts, self._begun()
            return self._watts

    def _begun(self) -> Energy | None:
        if self._meter is None:
            return None
        energy, self._since = Energy(self._meter), time.monotonic()
        energy.sample()
        return energy


def state_folder() -> Path:
    """Where snapshots go unless told otherwise: ``edgevlm/serve`` in the user's state folder (XDG)."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "edgevlm" / "serve"
