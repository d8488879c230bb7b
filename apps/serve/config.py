"""What ``edgevlm serve`` is to do: edgevlm.toml, checked key by key."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator

from edgevlm.apps.credentials import secret
from edgevlm.apps.journal import CAP as JOURNAL_CAP
from edgevlm.apps.journal import DAYS as JOURNAL_DAYS
from edgevlm.apps.run.thumbnails import CAP as THUMBNAILS_CAP
from edgevlm.apps.sources.hosts import AllowedHosts
from edgevlm.apps.watches.events import CAP, DAYS
from edgevlm.apps.watches.sinks import SinkSettings
from edgevlm.apps.watches.watch import Watch
from edgevlm.errors import UserError, nearest, reason
from edgevlm.runtime.engine import DEFAULT_ENGINE
from edgevlm.runtime.settings import AUTO, Append, Encode, Tokens
from edgevlm.runtime.snapshots.storage import is_address

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_CONFIG = 1 << 20  # bytes
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]
REDIS = r"(redis://(:[^@\s/]+@)?)?[A-Za-z0-9.-]+:[0-9]{1,5}"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
# while a server runs
FIXED = ("engine", "threads", "state", "snapshots", "state_key", "events", "thumbnails", "journal", "cluster")
FIXED_OF_SERVER = ("host", "port", "max_connections")


def checked_secret(value: str) -> str:
    """Where a key stands. Raises ValueError for a key itself."""
    if not value.startswith(("env:", "file:")):
        raise ValueError("give env:NAME or file:PATH; a key does not stand in the file itself")
    return value


def checked_redis(value: str) -> str:
    """Where a Redis is, or where that stands. Raises ValueError, and does not repeat what may be a password."""
    if not value.startswith(("env:", "file:")) and not re.fullmatch(REDIS, value):
        raise ValueError("give HOST:PORT, redis://:PASSWORD@HOST:PORT, or env:NAME or file:PATH where that stands")
    return value


def checked_address(value: str) -> str:
    """An IP address. Raises ValueError."""
    return str(ip_address(value))


SecretPlace = Annotated[str, AfterValidator(checked_secret)]
Fps = Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]
Budget = Annotated[Tokens, Field(ge=1, le=1 << 31)] | None
Days = Annotated[float, Field(gt=0, le=36_500)]
Megabytes = Annotated[int, Field(ge=1, le=1 << 20)]


class Section(BaseModel):
    """A table of the file: unknown keys are errors, and so are values of another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class CameraSettings(Section):
    """One camera. What is left out is as at the top of the file. source: as ``edgevlm run --camera`` takes it, or a secret."""

    source: str = "demo"
    model: str | None = None
    policy: str | None = None
    budget: Budget = None
    fps: Fps | None = None
    append: Append | None = None
    encode: Encode | None = None


class ServerSettings(Section):
    """The HTTP server. key: ``env:NAME`` or ``file:PATH``. hosts: further names that the page is reached by.

    source_hosts: names, addresses and networks that cameras added by clients may have; any but this machine's own unless given.
    any_source: clients may add anything, also files, devices and pipelines.

    max_requests: questions that run or wait at once; the next is answered 429. max_wait: seconds that one may wait for others;
    then it is answered 503. max_rate: requests a second of one address, over some seconds; the next is answered 429.
    max_body: bytes of a request, and of a picture that is fetched for one. max_pictures: that a question may show, frames of a
    video among them; cameras opened later have room for them.

    media_hosts: ``HOST`` or ``HOST:PORT`` that pictures may be fetched from, media_private: also where such a name leads to a
    private address. media_folders: whose videos may be shown.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    key: SecretPlace | None = None
    hosts: list[str] = []
    source_hosts: list[str] | None = None
    any_source: bool = False
    max_requests: Annotated[int, Field(ge=1, le=1024)] = 32
    max_wait: Annotated[float, Field(gt=0, le=86_400)] = 120.0
    max_rate: Annotated[float, Field(gt=0, le=1e6)] = 200.0
    max_connections: Annotated[int, Field(ge=1, le=65535)] = 256
    max_body: Annotated[int, Field(ge=1024, le=1 << 30)] = 16 << 20
    max_pictures: Annotated[int, Field(ge=0, le=16)] = 4
    media_hosts: list[str] = []
    media_private: bool = False
    media_folders: list[str] = []

    @field_validator("source_hosts")
    @classmethod
    def _source_hosts(cls, value: list[str] | None) -> list[str] | None:
        AllowedHosts(value)
        return value


class EventSettings(Section):
    """What is kept of what watches saw: for so many days, and so many megabytes, pictures included."""

    days: Days = DAYS
    megabytes: Megabytes = CAP >> 20


class ThumbnailSettings(Section):
    """What is kept of a camera's pictures: for so many days, and so many megabytes."""

    days: Days = 3650.0
    megabytes: Megabytes = THUMBNAILS_CAP >> 20


class JournalSettings(Section):
    """every: minutes from one line of a camera to the next, 0 for no journal. prompt: what the model is asked for one.

    changed: a tenth of that time after the last line the next is due once the model has taken in so many frames' worth of what
    changed (under ``append = "changed"``). max_tokens: of a line. context: tokens of lines that a question is given, those
    with its words; 0 for none. days, megabytes: that lines are kept.
    """

    every: Annotated[float, Field(ge=0, le=525_600)] = 0.0
    prompt: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    changed: Annotated[float, Field(gt=0, le=1e6)] = 2.0
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 48
    context: Annotated[int, Field(ge=0, le=65_536)] = 0
    days: Days = JOURNAL_DAYS
    megabytes: Megabytes = JOURNAL_CAP >> 20


class ClusterSettings(Section):
    """join: ``head`` or ``head:PORT`` to begin a cluster, or the head's address, ``HOST`` or ``HOST:PORT``; none unless given.

    snapshots: a folder that all nodes share, or an address, like ``s3://bucket/shop``, where cameras' snapshots and the head's
    state go. node: this one's name, the machine's unless given.
    address: an IP address of this machine that the others reach; found out unless given. memory: megabytes for edgevlm, as
    `edgevlm plan` finds unless given. redis: ``HOST:PORT`` of a Redis for what the head's Ray knows of the nodes, so that they
    need not start theirs anew when the head is started again; ``redis://:PASSWORD@HOST:PORT`` for one with a password, best as
    ``env:NAME`` or ``file:PATH``.
    """

    join: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.-]+(:[0-9]{1,5})?$")] | None = None
    snapshots: str | None = None
    node: Name | None = None
    address: Annotated[str, AfterValidator(checked_address)] | None = None
    memory: Megabytes | None = None
    redis: Annotated[str, AfterValidator(checked_redis)] | None = None


class ServeConfig(Section):
    """All of edgevlm.toml. state: the folder of snapshots and events; the user's state folder unless given.

    snapshots: an address, like ``s3://bucket/shop``, below which snapshots go instead. state_key: what they are encrypted with,
    ``env:NAME`` or ``file:PATH``.
    """

    model: str = "demo"
    policy: str = "auto"
    budget: Budget = None
    fps: Fps = 2.0
    append: Append = AUTO
    encode: Encode = AUTO
    engine: str = DEFAULT_ENGINE
    threads: Annotated[int, Field(ge=1, le=256)] | None = None
    state: str | None = None
    state_every: Annotated[float, Field(gt=0, le=86_400)] = 30.0
    state_key: SecretPlace | None = None
    snapshots: str | None = None
    server: ServerSettings = ServerSettings()
    cluster: ClusterSettings = ClusterSettings()
    events: EventSettings = EventSettings()
    thumbnails: ThumbnailSettings = ThumbnailSettings()
    journal: JournalSettings = JournalSettings()
    sinks: Annotated[list[SinkSettings], Field(max_length=64)] = []
    cameras: dict[Name, CameraSettings] = {}
    watches: Annotated[list[Watch], Field(max_length=256)] = []

    @field_validator("state")
    @classmethod
    def _state(cls, value: str | None) -> str | None:
        if value is not None and is_address(value):
            raise ValueError("a server keeps its state in a folder; give the address as --snapshots, for snapshots alone")
        return value

    @field_validator("snapshots")
    @classmethod
    def _snapshots(cls, value: str | None) -> str | None:
        if value is not None and not is_address(value):
            raise ValueError("give an address, like s3://bucket/shop; a folder is what state takes")
        return value

    @field_validator("watches")
    @classmethod
    def _watches(cls, value: list[Watch], info: Any) -> list[Watch]:
        names = [each.name for each in value]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two are called {twice[0]}; give one of them another name")
        cameras, sinks = info.data.get("cameras", {}), [each.name or each.kind for each in info.data.get("sinks", [])]
        for each in value:
            for sink in each.sinks:
                if sink not in sinks:
                    raise ValueError(f"{each.name}: there is no sink {sink!r}; {nearest(sink, sinks)}")
            for camera in each.cameras:
                if cameras and camera not in cameras:
                    raise ValueError(f"{each.name}: there is no camera {camera!r}; {nearest(camera, cameras)}")
        return value

    def camera(self, settings: CameraSettings) -> CameraSettings:
        """A camera's settings, with what it leaves out filled in."""
        own = settings.model_dump(exclude_none=True)
        shared = {name: getattr(self, name) for name in CameraSettings.model_fields if name != "source"}
        return CameraSettings(**{**shared, **own})


def server_key(server: ServerSettings) -> str | None:
    """The key that clients have to give. Raises UserError for an invalid one, and where other machines could ask without."""
    key = None if server.key is None else secret(server.key)
    if key is None and server.host not in LOOPBACK:
        raise UserError(f"--host {server.host} lets other machines in: set a key with --key-file")
    if key is not None and len(key) < 8:
        raise UserError("the server's key has fewer than 8 characters; use a longer one, like that of `openssl rand -hex 16`")
    if key is not None and not (key.isascii() and key.isprintable()):
        raise UserError("the server's key has characters that HTTP clients do not send; use ASCII on one line")
    return key


def as_far_as_running(before: ServeConfig, wanted: ServeConfig) -> tuple[ServeConfig, list[str]]:
    """``wanted`` as far as a running server can follow it, and a line for each key that waits for a restart."""
    kept: dict[str, Any] = {name: getattr(before, name) for name in FIXED}
    of_server = {name: getattr(before.server, name) for name in FIXED_OF_SERVER}
    waits = [name for name, value in kept.items() if getattr(wanted, name) != value]
    waits += [f"server.{name}" for name, value in of_server.items() if getattr(wanted.server, name) != value]
    config = wanted.model_copy(update={**kept, "server": wanted.server.model_copy(update=of_server)})
    return config, [f"{name}: it changes when the server is restarted" for name in waits]


def read_config(path: Path) -> ServeConfig:
    """Read edgevlm.toml. Raises UserError, one line that names the key and the nearest known one."""
    try:
        if not path.is_file():
            raise UserError(f"{path}: there is no such file; give an edgevlm.toml")
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG + 1)
        if len(raw) > MAX_CONFIG:
            raise UserError(f"{path}: is larger than {MAX_CONFIG} bytes")
        return check_config(tomllib.loads(raw.decode()), str(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is no TOML ({error})") from None


def check_config(values: Mapping[str, Any], where: str) -> ServeConfig:
    """Raises UserError for what is not a configuration; ``where`` it stands begins the message."""
    try:
        return ServeConfig.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{where}: {first_problem(error, ServeConfig)}") from None


def assign(values: dict[str, Any], text: str) -> None:
    """Put ``server.max_wait=30`` into ``values``: a value as in edgevlm.toml, or a text without quotes. Raises UserError."""
    name, equals, value = text.partition("=")
    *tables, key = name.strip().split(".")
    if not equals or not all(re.fullmatch(r"[\w-]+", part) for part in (*tables, key)):
        raise UserError(f"--set {text}: give KEY=VALUE, like server.max_wait=30")
    try:
        given = tomllib.loads(f"given = {value}")["given"]
    except ValueError:
        given = value.strip()
    for table in tables:
        values = values.setdefault(table, {})
        if not isinstance(values, dict):
            raise UserError(f"--set {text}: {table} is no table")
    values[key] = given


def first_problem(error: ValidationError, section: type[BaseModel]) -> str:
    """The first of a validation's errors, in one line that names the key."""
    found = error.errors(include_url=False, include_context=False)[0]
    path = [str(part) for part in found["loc"] if part != "[key]"]
    name = ".".join(path)
    if found["type"] == "extra_forbidden":
        return f"{name}: there is no such key; {nearest(path[-1], known_keys(section, path[:-1]))}"
    if found["type"] == "string_pattern_mismatch" and path[:1] == ["cameras"]:
        return f"{name}: a camera's name has small letters, digits, - and _, 64 at most"
    return f"{name}: {reason(found['msg'])}"


def known_keys(section: Any, path: list[str]) -> list[str]:
    """The keys of the table at ``path``."""
    for part in path:
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            break
        kind = section.model_fields[part].annotation if part in section.model_fields else None
        inner = [each for each in get_args(kind) if isinstance(each, type) and issubclass(each, BaseModel)]
        section = inner[-1] if inner else kind or section
    return list(section.model_fields)


def named_cameras(sources: list[str]) -> dict[str, CameraSettings]:
    """``--camera SRC``, as often as given: the demo is ``demo``, ``NAME=SRC`` is named, others are camera, camera-2, ..."""
    cameras: dict[str, CameraSettings] = {}
    for source in sources:
        match = re.fullmatch(r"([a-z0-9][a-z0-9_-]{0,63})=(.+)", source)
        name, given = (match[1], match[2]) if match else ("demo" if source == "demo" else "camera", source)
        number, unique = 1, name
        while unique in cameras:
            number += 1
            unique = f"{name}-{number}"
        cameras[unique] = CameraSettings(source=given)
    return cameras
