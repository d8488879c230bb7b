"""The models, cameras and watches of a server, without HTTP."""

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
from edgevlm.apps.credentials import mask_credentials, state_key
from edgevlm.apps.forget import MARK, Forgotten, cameras, forget_camera, mark
from edgevlm.apps.hosts import AllowedHosts
from edgevlm.apps.journal import Journal, Line
from edgevlm.apps.names import id_of, program_id, short_hash
from edgevlm.apps.run.clock import Span
from edgevlm.apps.run.thumbnails import as_jpeg
from edgevlm.apps.serve.config import CameraSettings, ServeConfig, as_far_as_running, server_key
from edgevlm.apps.serve.stream import CameraStream, stream_options
from edgevlm.apps.sources import SourceOptions, check_source, comes_to_an_end, open_source
from edgevlm.apps.sources.network import split_address
from edgevlm.apps.watches.delivery import Delivery
from edgevlm.apps.watches.events import MOST, EventStore, WatchEvent
from edgevlm.apps.watches.sinks import Program, Sink, open_sinks
from edgevlm.apps.watches.watch import Watch
from edgevlm.apps.watches.watcher import Watcher
from edgevlm.apps.watches.watches import Watches
from edgevlm.engines.power import Energy, find_meter
from edgevlm.errors import FieldError, UserError, nearest
from edgevlm.progress import Lost, Notify, progress
from edgevlm.runtime.files import home
from edgevlm.runtime.model import Model
from edgevlm.runtime.plugins import is_file, names
from edgevlm.runtime.policies import POLICIES
from edgevlm.runtime.settings import AUTO, check_policy

MAX_STREAMS = 256
TEST_S = 10.0  # longest wait for a tested source's first frame
LOOK_S = 2.0
TEST_FPS = 100  # a test of a source reads at most 100 frames, and at most 100 a second
CLOSING_S = 30.0
REOPEN_S = 60.0
CLIENTS_ADD = r"demo|\d{1,3}|(?i:rtsps?|rtmps?|https?)://\S+"  # sources clients may add: no files, pipelines or programs


@contextmanager
def field(name: str) -> Iterator[None]:
    """Convert a UserError raised inside the ``with`` block to a FieldError for the field ``name``."""
    try:
        yield
    except UserError as error:
        raise FieldError(name, str(error)) from None


def check_client_policy(policy: str | None) -> None:
    """Raise FieldError unless the policy is registered. Clients may not use a policy from a file, which could run any code."""
    if policy is not None and policy.partition(":")[0] not in (AUTO, *POLICIES, *names("policies")):
        raise FieldError("policy", "unknown policy; GET /v1/policies lists all")


class Hooks:
    """The parts of a service that work differently in a cluster."""

    def camera_folder(self, service: Service, name: str) -> Path:
        return service.state / name

    def camera_address(self, service: Service, name: str) -> str | None:
        snapshots = service.config.snapshots
        return None if snapshots is None else f"{snapshots.rstrip('/')}/{name}"

    def may_watch(self, name: str) -> bool:
        return True

    def may_record(self, event: WatchEvent) -> bool:
        return True

    def cameras_elsewhere(self) -> Collection[str]:
        return ()

    def replace_cameras(self, service: Service, before: ServeConfig, config: ServeConfig) -> list[str]:
        return service.replace_cameras(before, config)

    def replace_watches(self, service: Service, before: Iterable[Watch], after: Iterable[Watch]) -> list[str]:
        return service.watches.replace(before, after)


class Service:
    """Runs the cameras and watches of a configuration. Each model is loaded once. Any thread may call any method."""

    def __init__(
        self,
        config: ServeConfig,
        notify: Notify,
        options: SourceOptions | None = None,
        sinks: Mapping[str, Sink] | None = None,
    ) -> None:
        self.config, self.key = config, server_key(config.server)
        self.streams: dict[str, CameraStream] = {}
        self._models: dict[str, Model] = {}
        self._reopen_at: dict[str, float] = {}  # time from which each camera with a half-changed memory may be reopened
        self.notify, self._lock = notify, threading.RLock()
        self.power, self.page = Power(), ""  # page: the web page's URL, once known
        self._delivery: Delivery | None = None
        self._journal: Journal | None = None
        states = "" if config.state else os.environ.get("XDG_STATE_HOME") or home() / ".local" / "state"
        self.state = Path(config.state or Path(states, "edgevlm", "serve"))
        self.state_key = state_key(config.state_key)
        self._options, self._sinks = options or SourceOptions(), sinks or {}
        self.hooks = Hooks()  # a cluster node sets its own hooks before it opens the service
        self.watches = Watches(self._watchers, lambda: self.delivery, notify, lambda: self.hooks)

    def open(self) -> None:
        """Open sinks, cameras and watches. Raises UserError at the first failure, after closing what is open."""
        try:
            if self.config.sinks or self._sinks:
                _ = self.delivery
            with self.watches.held():
                for name, settings in self.config.cameras.items():
                    self.add(name, settings)
                for watch in self.config.watches:
                    self.watches.add(watch)
                self._end_removed()
            if self.has_events:
                self.watches.announce(anyway=True)  # announce the watches even if none is left
        except BaseException:
            self.close()
            raise

    def add(self, name: str, settings: CameraSettings, by_client: bool = False, paused: bool = False) -> CameraStream:
        """Open a camera and watch it. Raises UserError, or FieldError if one of its settings is invalid.

        ``by_client``: whether the camera is added by a client. Clients may use only some sources and policies.
        ``paused``: whether to open the camera without watching it.
        """
        hosts = self.check_client(settings) if by_client else None
        with self._lock:
            if name in self.streams:
                raise FieldError("id", f"stream {name} already exists; remove it first or choose another name")
            if len(self.streams) >= MAX_STREAMS:
                raise UserError(f"the limit of {MAX_STREAMS} streams is reached; remove one first")
            wanted = self.config.camera(settings)
            with field("source"):
                address = wanted.address()
            if address == "-":
                raise UserError(f"stream {name}: serve does not support stdin as a source; use a camera or an address")
            with field("source"):
                check_source(address, None)
            with field("policy"):
                check_policy(wanted.policy or "auto")
            folder = self.hooks.camera_folder(self, name)
            if by_client:  # watch a video file again, even if what was seen in it was deleted
                (folder / MARK).unlink(missing_ok=True)
            return self._open(name, wanted, folder, hosts, paused)

    def switch(self, name: str, policy: str | None, budget: str | int | None) -> CameraStream:
        """Change a camera's policy or budget until the server restarts. The camera's new memory starts empty and is not saved.

        After a UserError the camera continues from its last snapshot.
        """
        check_client_policy(policy)
        with self._lock, field("policy" if policy else "budget"):
            before = self.stream(name)
            change = {"policy": check_policy(policy or before.settings.policy), "budget": budget or before.settings.budget}
            try:
                return self._open_again(before, before.settings.model_copy(update=change), None)
            except BaseException:
                self._open_again(before, before.settings, before.folder)
                raise

    def forget(self, name: str | None, span: Span) -> dict[str, Forgotten]:
        """Delete what a camera saw in a period. Without ``name``, delete what all cameras saw, including removed cameras.

        Deleting everything empties all memories. Cameras that play video files are paused until a user resumes them, even after
        a restart. Returns the number of deleted items by camera and kind. If this raises UserError, data deleted before the
        error is not restored.
        """
        with self._lock:
            watched = list(self.streams) if name is None else [] if name in self.removed() else [self.stream(name).name]
            done = {each: self._forget_all(each) if span.everything else self.stream(each).forget(span) for each in watched}
            for each, counts in self.forget_kept(name, span).items():
                done[each] = {**done.get(each, {}), **counts}
            return done

    def forget_kept(self, name: str | None, span: Span) -> dict[str, Forgotten]:
        """Delete the same data as :meth:`forget`, except from the memories of open cameras."""
        with self._lock:
            done: dict[str, Forgotten] = {}
            for each, path in self.removed().items():
                for where in (path, self.hooks.camera_address(self, each)) if name in (None, each) else ():
                    if where is not None:
                        done[each] = done.get(each, {}) | self.forget_at(where, span)
            if self.has_events or (self.state / EventStore.FILE).exists():
                done.setdefault(name or "", {})["events"] = self.delivery.store.delete(name, span.since, span.until)
            if self.journal is not None:
                done.setdefault(name or "", {})["journal"] = self.journal.delete(name, span.since, span.until)
            return done

    def forget_at(self, where: str | Path, span: Span) -> Forgotten:
        """Delete a period's data in a folder or at an address. No open camera may use this place. Raises UserError."""
        return forget_camera(where, span, self.state_key)

    def removed(self) -> dict[str, Path]:
        """Return the folder of each camera that is no longer watched but still has saved data."""
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
            self.forget_at(address, Span())
        if before.ends:
            mark(folder)
        self._open_again(before, before.settings, before.folder)
        return {"thumbnails": count}

    def check_client(self, settings: CameraSettings) -> AllowedHosts | None:
        """Return the hosts that a client's camera may reach, or None if every host is allowed.

        Raises FieldError for a source or policy that clients may not use.
        """
        check_client_policy(settings.policy)
        source, server = settings.source, self.config.server
        places = (source, settings.username or "", settings.password or "")
        if any(each.startswith(("env:", "file:")) for each in places) or is_file(source) or source == "-":
            raise FieldError("source", "secrets, programs and standard input are allowed only in the configuration")
        if server.any_source:
            return None
        if not re.fullmatch(CLIENTS_ADD, source):
            what = "must be demo, an index like 0, or an address (rtsp, rtmp, http)"
            raise FieldError("source", f"{what}; the operator can allow other sources with server.any_source")
        hosts = AllowedHosts(server.source_hosts)
        if "://" in source:
            with field("source"):
                parts = split_address(source)
                hosts.resolve(parts.hostname or "", parts.port or 0)
        return hosts

    def remove(self, name: str, keep_model: bool = False, again: bool = False) -> None:
        """Stop watching a camera; keep its snapshots. Raises UserError for an unknown stream.

        ``keep_model``: whether to keep the camera's model loaded even if no other camera uses the model. ``again``: whether the
        caller will open the camera again; if so, open watches stay open.
        """
        with self._lock:
            stream = self.stream(name)
            if not again and name not in self.hooks.cameras_elsewhere():
                stream.watcher.end()
            self.streams = {key: value for key, value in self.streams.items() if key != name}
            self.watches.announce()
            stream.close()
            if not keep_model:
                self._close_unused_models()

    def _end_removed(self) -> None:
        """Close each watch that was open when the server stopped and is no longer in the configuration."""
        if not (self.has_events or (self.state / EventStore.FILE).exists()):
            return
        asked = {(camera, watch) for camera, watcher in self._watchers().items() for watch in watcher.states()}
        for event in self.delivery.store.open_now():
            if (event.camera, event.watch) not in asked:
                self.delivery.record(replace(event, state="close", time=time.time(), probability=0.0, evidence=()), (), ())

    def _close_unused_models(self) -> None:
        used = {stream.model for stream in self.streams.values()}
        for key in [key for key, model in self._models.items() if model not in used]:
            self._models.pop(key).close()

    def reload(self, config: ServeConfig) -> list[str]:
        """Apply a new configuration; unchanged cameras keep running. Returns a line for each change or failure.

        Raises UserError, and changes nothing, if the key is invalid.
        """
        with self._lock:
            before, (config, done) = self.config, as_far_as_running(self.config, config)
            self.key, self.config = server_key(config.server), config
            with self.watches.held():
                done += self.hooks.replace_cameras(self, before, config)
            self._close_unused_models()
            if config.sinks != before.sinks:
                try:
                    self.delivery.replace({**open_sinks(config.sinks), **self._sinks})
                    done.append("sinks: reopened")
                except UserError as error:
                    done.append(mask_credentials(str(error)))
            return done + self.hooks.replace_watches(self, before.watches, config.watches)

    def replace_cameras(self, before: ServeConfig, config: ServeConfig) -> list[str]:
        """Add, remove and reopen cameras as a new configuration requires. Return a line for each change or failure."""
        done = []
        for name in {**before.cameras, **config.cameras}:
            running, settings = self.streams.get(name), config.cameras.get(name)
            if running is not None and settings is not None:
                is_switched = running.folder is None and name in before.cameras
                if config.camera(settings) == (before.camera(before.cameras[name]) if is_switched else running.settings):
                    continue
            try:
                if running is not None:
                    self.remove(name, keep_model=True, again=settings is not None)
                if settings is not None:
                    self.add(name, settings)
                done.append(f"{name}: {'removed' if settings is None else 'reopened' if running else 'added'}")
            except UserError as error:
                done.append(f"{name}: {mask_credentials(str(error))}")
        return done

    @property
    def delivery(self) -> Delivery:
        """The object that delivers events to sinks, made on first use. Raises UserError."""
        if self._delivery is None:
            with self._lock:
                if self._delivery is None:
                    sinks, kept = {**open_sinks(self.config.sinks), **self._sinks}, self.config.events
                    store = EventStore(self.state, self.notify, days=kept.days, cap=kept.megabytes << 20)
                    self._delivery = Delivery(store, sinks, self.notify, self.watches.control, self._program())
        return self._delivery

    def _program(self) -> Program:
        """Return how this program identifies itself to sinks.

        All nodes of a cluster share one id, so a camera keeps its Home Assistant entities when it moves to another node.
        """
        cluster = self.config.cluster
        if cluster.join is not None:
            return Program(short_hash(mask_credentials(cluster.snapshots or "")), self.page, shared=True)
        return Program(program_id(self.state), self.page)

    @property
    def has_events(self) -> bool:
        return self._delivery is not None

    @property
    def journal(self) -> Journal | None:
        """The cameras' journal, or None if no journal is kept. Raises UserError."""
        kept = self.config.journal
        if self._journal is None and (kept.every or (self.state / Journal.FILE).exists()):
            with self._lock:
                if self._journal is None:
                    self._journal = Journal(self.state, self.notify, days=kept.days, cap=kept.megabytes << 20)
        return self._journal

    def lines(self, **query: Any) -> list[Line]:
        """Return the journal lines that :meth:`Journal.query` finds. ``jpeg_url`` is None if the thumbnail was deleted."""

        def pictured(line: Line, seen: Mapping[str, Any]) -> dict[str, Any]:
            stream = self.streams.get(line.camera)
            return {**seen, "jpeg_url": stream and stream.picture_url(seen["frame"], seen["time"])}

        found = [] if self.journal is None else self.journal.query(**query)
        return [replace(line, evidence=[pictured(line, seen) for seen in line.evidence]) for line in found]

    def digest(self, since: float, until: float, camera: str | None = None, search: str | None = None) -> list[dict[str, Any]]:
        """Return the openings of watches and the journal lines in a period, oldest first, as in ``GET /v1/digest``."""
        opened = self.delivery.store.openings(since, until, camera, search)
        written = self.lines(search=search, since=since, until=until, camera=camera, limit=MOST)
        found = [(each.event.opened, {"event": "opening", **each.json()}) for each in opened]
        found += [(line.time, {"event": "line", **line.json()}) for line in written]
        return [fields for _, fields in sorted(found, key=itemgetter(0))]

    def stream(self, name: str | None) -> CameraStream:
        """Return the named stream, or the only stream if ``name`` is None. Raises UserError."""
        if name is None:
            if len(self.streams) == 1:
                return next(iter(self.streams.values()))
            raise UserError(f"no stream selected; {nearest('', self.streams)}")
        if (found := self.streams.get(id_of(name))) is None:
            raise UserError(f"stream {name!r} not found; {nearest(name, self.streams)}")
        return found

    def signs_of_life(self) -> dict[str, tuple[int, int]]:
        """Return each watched stream's counters (run loop, model). A stream is alive while either counter rises."""
        streams, steps = self.streams, Counter[Model]()
        for stream in streams.values():
            steps[stream.model] += stream.session.stats.frames + stream.pieces
        watched = {name: each for name, each in streams.items() if not (each.paused or each.problem)}
        return {name: (each.signs.count, steps[each.model]) for name, each in watched.items()}

    def reopen_torn(self) -> None:
        """Reopen each camera whose memory an error has damaged. The camera resumes from its last snapshot. Does not wait."""
        now = time.monotonic()
        for name, stream in self.streams.items():
            if stream.session.is_torn and now >= self._reopen_at.get(name, 0.0):
                self._reopen_at[name] = now + REOPEN_S
                threading.Thread(target=self._reopen, args=(stream,), name="edgevlm-reopen", daemon=True).start()

    def _reopen(self, torn: CameraStream) -> None:
        with self._lock:
            if self.streams.get(torn.name) is torn:
                torn.notice(Lost("an error left the memory half changed; continuing from the last snapshot"))
                try:
                    self._open_again(torn, torn.settings, torn.folder)
                except Exception as error:
                    torn.problem = mask_credentials(str(error) or type(error).__name__)
                    torn.notice(f"cannot reopen: {torn.problem}")

    def close(self) -> None:
        """Close each stream after a last snapshot. If all streams close within CLOSING_S seconds, also close the models."""
        with self._lock:
            self.watches.close()
            streams, self.streams = self.streams, {}
            threads = [threading.Thread(target=each.close, name=name, daemon=True) for name, each in streams.items()]
            for thread in threads:
                try:
                    thread.start()
                except RuntimeError:  # no thread can be started
                    thread.run()
            end = time.monotonic() + CLOSING_S
            for thread in filter(lambda each: each.ident, threads):
                thread.join(max(0.0, end - time.monotonic()))
            if self._delivery is not None:
                self._delivery.close()
                self._delivery.store.close()
            if self._journal is not None:
                self._journal.close()
            if late := [thread.name for thread in threads if thread.is_alive()]:
                what = f"not closed within {CLOSING_S:g} s; the previous snapshot is kept"
                self.notify(Lost(f"{', '.join(late)}: {what}"))
                return
            self._close_unused_models()

    def test(self, settings: CameraSettings) -> dict[str, Any]:
        """Open a source, read it briefly and describe it. Raises UserError if the source is not allowed or sends no frame."""
        hosts = self.check_client(settings)
        options = SourceOptions(fps=TEST_FPS, open_timeout_s=TEST_S, read_timeout_s=TEST_S, hosts=hosts)
        began = time.monotonic()
        with field("source"):
            opened = open_source(settings.address(), None, options)
        giving_up = threading.Timer(TEST_S, opened.interrupt)
        giving_up.start()
        try:
            frame = first = opened.read()
            frames, first_s = 1, time.monotonic() - began
            if frame is None or first is None:
                raise UserError(f"opened, but sent no picture within {TEST_S:g} s")
            while frames < TEST_FPS and time.monotonic() - began < first_s + LOOK_S and (more := opened.read()) is not None:
                frame, frames = more, frames + 1
        finally:
            giving_up.cancel()
            opened.close()
        span, (height, width) = frame.time_s - first.time_s, frame.image.shape[:2]
        return {
            "object": "stream.test", "width": width, "height": height, "first_frame_ms": round(1e3 * first_s, 1),
            "fps": round((frames - 1) / span, 2) if span > 0 else None, "jpeg": b64encode(as_jpeg(frame.image)).decode(),
        }  # fmt: skip

    def _watchers(self) -> dict[str, Watcher]:
        return {name: stream.watcher for name, stream in self.streams.items()}

    def _open(
        self, name: str, settings: CameraSettings, folder: Path | None, hosts: AllowedHosts | None, paused: bool
    ) -> CameraStream:
        if folder is not None and (folder.is_symlink() or (folder.parent != self.state and folder.parent.is_symlink())):
            raise UserError(f"{folder}: is a symbolic link, whose target edgevlm must not clean up; replace it with a folder")
        options = stream_options(replace(self._options, hosts=hosts), settings)
        if comes_to_an_end(settings.address(), None) and (self.hooks.camera_folder(self, name) / MARK).exists():
            paused = True
            self.notify(f"{name}: paused because this recording was forgotten; resume it to watch it again")
        stream = CameraStream(self, name, settings, options, folder, paused)
        self.streams = {**self.streams, name: stream}
        self.watches.attach(stream.watcher)
        stream.start()
        return stream

    def _open_again(self, stream: CameraStream, settings: CameraSettings, folder: Path | None) -> CameraStream:
        stream.close()
        stream.problem = stream.problem or "its memory is being reopened"
        return self._open(stream.name, settings, folder, stream.hosts, stream.paused)

    def model(self, name: str) -> Model:
        """Return the named model, loading it on first use. Raises UserError."""
        if name not in self._models:
            with progress("reading the model") as step:
                bundle = resolve_model(name, step, lambda line: self.notify(mask_credentials(line)), self.config.engine)
            with progress("verifying and loading the model"):
                self._models[name] = Model.load(bundle, engine=self.config.engine, threads=self.config.threads)
        return self._models[name]


class Power:
    def __init__(self) -> None:
        self._meter, _ = find_meter()
        self._lock, self._since = threading.Lock(), -1.0
        self._energy: Energy | None = None
        self._watts: float | None = None

    def watts(self) -> float | None:
        """Return the machine's mean power in watts since the last measurement, or None if it is unknown."""
        with self._lock:
            if self._meter is not None and time.monotonic() - self._since >= 1.0:
                if self._energy is not None:
                    self._energy.sample()
                    self._watts = self._energy.watts
                self._energy, self._since = Energy(self._meter), time.monotonic()
                self._energy.sample()
            return self._watts
