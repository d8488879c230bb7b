"""Read and check edgevlm.toml, the configuration of ``edgevlm serve``."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)  # fmt: skip

from edgevlm.apps.credentials import secret, with_login
from edgevlm.apps.hosts import AllowedHosts
from edgevlm.apps.journal import Journal
from edgevlm.apps.names import Id, Name, id_of, printable
from edgevlm.apps.run.thumbnails import Thumbnails
from edgevlm.apps.sources.gstreamer import is_pipeline
from edgevlm.apps.watches.events import EventStore
from edgevlm.apps.watches.sinks import SinkSettings
from edgevlm.apps.watches.watch import Watch
from edgevlm.errors import UserError, nearest, reason
from edgevlm.runtime.engine import DEFAULT_ENGINE
from edgevlm.runtime.settings import AUTO, LONGEST_QUESTION, Append, Encode, Tokens
from edgevlm.runtime.snapshots.directory import is_address

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PICTURES = 4  # memory is reserved at startup for this many pictures per question
LOOPBACK = ("127.0.0.1", "::1", "localhost")
# settings whose changes apply only after a restart
FIXED = ("engine", "threads", "state", "snapshots", "state_key", "events", "thumbnails", "journal", "cluster")
FIXED_OF_SERVER = ("host", "port", "max_connections")

SecretPlace = Annotated[str, StringConstraints(pattern="^(env|file):")]
Fps = Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)]
Budget = Annotated[Tokens, Field(ge=1, le=1 << 31)] | None
Days = Annotated[float, Field(gt=0, le=36_500)]
Megabytes = Annotated[int, Field(ge=1, le=1 << 20)]


class Section(BaseModel):
    """A table of edgevlm.toml. Unknown keys and values of the wrong type are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class CameraSettings(Section):
    """One camera's settings. An omitted setting defaults to edgevlm.toml's top-level key of the same name.

    ``source`` is written as for ``edgevlm run --camera``; ``username`` and ``password`` are the source's login. ``env:NAME`` or
    ``file:PATH`` keeps an address or a login out of edgevlm.toml. ``name`` is the displayed name, by default the name of the
    camera's table.
    """

    source: str = "demo"
    username: str | None = None
    password: str | None = None
    name: Name | None = None
    model: str | None = None
    policy: str | None = None
    budget: Budget = None
    fps: Fps | None = None
    append: Append | None = None
    encode: Encode | None = None

    def address(self) -> str:
        """Return the camera's source with its login and secrets filled in. Raises UserError."""
        login = (None if each is None else secret(each) for each in (self.username, self.password))
        return with_login(secret(self.source), *login)


class ServerSettings(Section):
    """Settings of the HTTP server.

    ``hosts`` lists the host names under which browsers may open the web page. Set ``root_path`` to the path under which a proxy
    serves the page, unless the proxy removes the path or names it in a header. ``source_hosts`` lists the hosts whose cameras
    clients may add, by default all hosts except this machine. ``any_source`` lets clients add files, devices and pipelines.

    ``max_requests`` limits the questions that run or wait, and ``max_rate`` limits the requests per second from one address.
    ``max_body`` limits the size of a request, and of each picture fetched for a request, in bytes. ``max_question_tokens``
    limits the tokens of a question with its history and tools. ``max_pictures`` limits the pictures and video frames in a
    question. Pictures are fetched only from ``media_hosts``; private addresses are allowed only if ``media_private`` is set.
    Videos are read only from ``media_folders``.
    """

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    key: SecretPlace | None = None
    hosts: list[str] = []
    root_path: Annotated[str, StringConstraints(pattern="^(/|$)")] = ""
    source_hosts: Annotated[list[str] | None, AfterValidator(lambda hosts: AllowedHosts(hosts) and hosts)] = None
    any_source: bool = False
    max_requests: Annotated[int, Field(ge=1, le=1024)] = 32
    max_rate: Annotated[float, Field(gt=0, le=1e6)] = 200.0
    max_connections: Annotated[int, Field(ge=1, le=65535)] = 256
    max_body: Annotated[int, Field(ge=1024, le=1 << 30)] = 16 << 20
    max_question_tokens: Annotated[int, Field(ge=1, le=1 << 20)] = LONGEST_QUESTION
    max_pictures: Annotated[int, Field(ge=0, le=1024)] = 64
    media_hosts: list[str] = []
    media_private: bool = False
    media_folders: list[str] = []


class KeptSettings(Section):
    """Limits on stored data: its age in days and its size, with pictures, in megabytes."""

    days: Days = EventStore.DAYS
    megabytes: Megabytes = EventStore.CAP >> 20


class ThumbnailSettings(KeptSettings):
    days: Days = 3650.0
    megabytes: Megabytes = Thumbnails.CAP >> 20


class JournalSettings(KeptSettings):
    """Settings of the journal.

    Each camera gets a journal line every ``every`` minutes; 0 turns the journal off. Each journal line answers ``prompt`` in at
    most ``max_tokens`` tokens. With ``append = "changed"``, a line is written early once as many tokens have changed as
    ``changed`` frames hold. Journal lines are at least a tenth of ``every`` apart. Before a question, the model reads up to
    ``context`` tokens of journal lines that share words with the question.
    """

    days: Days = Journal.DAYS
    megabytes: Megabytes = Journal.CAP >> 20
    every: Annotated[float, Field(ge=0, le=525_600)] = 0.0
    prompt: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    changed: Annotated[float, Field(gt=0, le=1e6)] = 2.0
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 48
    context: Annotated[int, Field(ge=0, le=65_536)] = 0


class ClusterSettings(Section):
    """Settings of a node in a cluster.

    ``join`` is ``head`` or ``head:PORT`` to start a cluster, or the head's ``HOST`` or ``HOST:PORT`` to join one. The cameras'
    snapshots and the head's state are kept in ``snapshots``: a folder that all nodes share, or an address like
    ``s3://bucket/shop``. ``node`` is this node's name, by default the machine's name. Other nodes reach this machine at the IP
    address ``address``. edgevlm may use ``memory`` megabytes, by default the memory that ``edgevlm plan`` reports as usable.
    """

    join: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9.-]+(:[0-9]{1,5})?$")] | None = None
    snapshots: str | None = None
    node: Id | None = None
    address: Annotated[str, AfterValidator(lambda value: str(ip_address(value)))] | None = None
    memory: Megabytes | None = None


def by_id(cameras: Any) -> Any:
    """Return the cameras by id. If a table's name is not a valid id, it becomes the camera's displayed name."""
    if not isinstance(cameras, dict):
        return cameras
    found: dict[str, Any] = {}
    for key, settings in cameras.items():
        name, called = id_of(printable(key)), settings
        if name != key and isinstance(settings, dict):
            called = {"name": key, **settings}
        if name in found:
            raise ValueError(f"duplicate id {name!r}; rename one")
        found[name] = called
    return found


class ServeConfig(Section):
    """All settings in edgevlm.toml.

    ``state`` is the folder for snapshots and events, by default a folder in the user's state folder. If ``snapshots`` is set,
    snapshots are stored at this address, such as ``s3://bucket/shop``, instead of in ``state``. ``state_key`` names the key
    that encrypts snapshots (``env:NAME`` or ``file:PATH``).
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
    events: KeptSettings = KeptSettings()
    thumbnails: ThumbnailSettings = ThumbnailSettings()
    journal: JournalSettings = JournalSettings()
    sinks: Annotated[list[SinkSettings], Field(max_length=64)] = []
    cameras: Annotated[dict[Id, CameraSettings], BeforeValidator(by_id)] = {}
    watches: Annotated[list[Watch], Field(max_length=256)] = []

    @model_validator(mode="after")
    def _names(self) -> ServeConfig:
        if is_address(self.state or "."):
            raise ValueError("state: must be a folder; set the address as snapshots instead")
        if not is_address(self.snapshots or "s3://"):
            raise ValueError("snapshots: must be an address like s3://bucket/shop; set a folder as state instead")
        known = {"sinks": [each.name or each.kind for each in self.sinks], "cameras": list(self.cameras)}
        called = [watch.name for watch in self.watches]
        for watch in self.watches:
            if called.count(watch.name) > 1:
                raise ValueError(f"watches: duplicate name {watch.name!r}; rename one")
            for kind, names in known.items():
                for name in getattr(watch, kind):
                    if name not in names and (names or kind == "sinks"):
                        raise ValueError(f"watches: {watch.name}: {kind[:-1]} {name!r} not found; {nearest(name, names)}")
        return self

    def camera(self, settings: CameraSettings) -> CameraSettings:
        """Return a camera's settings, with omitted settings filled in from the file's top-level keys."""
        shared = {name: getattr(self, name) for name in CameraSettings.model_fields if name in type(self).model_fields}
        return CameraSettings(**{**shared, **settings.model_dump(exclude_none=True)})


def server_key(server: ServerSettings) -> str | None:
    """Return the key that clients must send. Raises UserError if the key is invalid, or is needed but not set."""
    key = None if server.key is None else secret(server.key)
    if key is None and server.host not in LOOPBACK:
        raise UserError(f"--host {server.host} accepts connections from other machines; set a key with --key-file")
    if key is not None and (len(key) < 8 or not (key.isascii() and key.isprintable())):
        raise UserError("server key: must be 8 or more ASCII characters on one line; make one with: openssl rand -hex 16")
    return key


def as_far_as_running(before: ServeConfig, wanted: ServeConfig) -> tuple[ServeConfig, list[str]]:
    """Return the new settings that a running server can apply, and a line for each change that needs a restart."""
    kept = {name: getattr(before, name) for name in FIXED}
    kept_of_server = {name: getattr(before.server, name) for name in FIXED_OF_SERVER}
    waits = [name for name, value in kept.items() if getattr(wanted, name) != value]
    waits += [f"server.{name}" for name, value in kept_of_server.items() if getattr(wanted.server, name) != value]
    config = wanted.model_copy(update={**kept, "server": wanted.server.model_copy(update=kept_of_server)})
    return config, [f"{name}: restart the server to apply the change" for name in waits]


def settings_of(
    path: Path | None,
    cameras: list[str] | None = None,
    given: Mapping[str, Any] | None = None,
    assigned: list[str] | None = None,
) -> ServeConfig:
    """Read a configuration file, then apply the settings of the command line. Raises UserError.

    ``cameras``: sources, as ``NAME=SRC`` or SRC. Cameras without a name are called demo, camera, camera-2, ..
    ``assigned``: settings as ``KEY=VALUE``.
    ``given``: settings by key, applied last; settings that are None are ignored.
    """
    values = {} if path is None else read_toml(path)
    for text in assigned or ():
        _put(values, _assignment(text))
    _put(values, given or {})
    named: dict[str, Any] = {}
    for source in cameras or ():
        match = None if is_pipeline(source) else re.fullmatch(r"([^\W_][\w -]{0,99})=(.+)", source)
        name, source = (match[1], match[2]) if match else ("demo" if source == "demo" else "camera", source)
        if match and name in named:
            raise UserError(f"--camera {name}=: duplicate camera name; rename one")
        same = sum(re.fullmatch(rf"{name}(-\d+)?", each) is not None for each in named)
        named[f"{name}-{same + 1}" if same else name] = {"source": source}
    _put(values, {"cameras": named})
    if not values["cameras"] and not (values.get("cluster") or {}).get("join"):
        values["cameras"] = {"demo": {}}
    return check_config(values, "serve" if path is None else str(path), path)


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not valid TOML ({error})") from None


class ConfigError(UserError):
    """Raised for an invalid configuration. ``faults`` has a line for each fault."""

    def __init__(self, faults: list[str]) -> None:
        more = f" ({len(faults) - 1} more: edgevlm config check shows all)" if len(faults) > 1 else ""
        super().__init__(faults[0] + more)
        self.faults = faults


def check_config(values: Mapping[str, Any], where: str, path: Path | None = None) -> ServeConfig:
    """Validate a configuration. Raises ConfigError; each message starts with ``where`` and, for a file, the line number."""
    try:
        return ServeConfig.model_validate(values)
    except ValidationError as error:
        schema = ServeConfig.model_json_schema()
        keys = {  # by table
            table: [key for name in re.findall(r"#/\$defs/(\w+)", str(part)) for key in schema["$defs"][name]["properties"]]
            for table, part in schema["properties"].items()
        }
        tables = {key: f"in [{table}]" for table, known in keys.items() for key in known}
        tables |= dict.fromkeys(schema["properties"], "above all tables")
        found = list[tuple[tuple[str, ...], str]]()
        for each in error.errors(include_url=False, include_context=False):
            key = tuple(str(part) for part in each["loc"] if part != "[key]")
            name = "".join(key[-1:])
            known = (keys.get(key[0]) if len(key) > 1 else None) or tables
            hint = f"it belongs {tables[name]}" if name in tables else nearest(name, known)
            found.append((key, f"unknown key; {hint}" if each["type"] == "extra_forbidden" else reason(each["msg"])))
        raise ConfigError(_located(found, where, path)) from None


def missing_secrets(config: ServeConfig, path: Path) -> list[str]:
    """Return a line for each key whose ``env:NAME`` or ``file:PATH`` cannot be read."""
    found = list[tuple[tuple[str, ...], str]]()
    for key, value in _leaves(config.model_dump()):
        try:
            secret(str(value))
        except UserError as error:
            found.append((key, str(error)))
    return _located(found, str(path), path)


def _leaves(value: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict | list):
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(each, (*key, str(name)))
    else:
        yield key, value


def _located(found: list[tuple[tuple[str, ...], str]], where: str, path: Path | None) -> list[str]:
    """Return ``where, line N: KEY: ERROR`` for each invalid key, ordered by line."""
    numbers = {} if path is None else _lines_of(path.read_text(encoding="utf-8"))
    faults = []
    for key, what in found:
        line = next((numbers[key[:size]] for size in range(len(key), 0, -1) if key[:size] in numbers), 0)
        faults.append((line, ": ".join(filter(None, (f"{where}, line {line}" if line else where, ".".join(key), what)))))
    return [fault for _, fault in sorted(faults)]


def _lines_of(text: str) -> dict[tuple[str, ...], int]:
    """Return the line number of each TOML table and key that starts a line."""
    found, counts, table = dict[tuple[str, ...], int](), Counter[tuple[str, ...]](), tuple[str, ...]()
    for number, line in enumerate(text.splitlines(), 1):
        match = re.match(r"""\s*(\[{0,2})\s*((?:"[^"]*"|'[^']*'|[\w.-])+)\s*[]=]""", line)
        parts = tuple(part.strip("\"'") for part in re.findall(r"\"[^\"]*\"|'[^']*'|[^.]+", match[2])) if match else ()
        if match is None or not parts:
            continue
        if match[1]:
            table = (parts[0], id_of(parts[1]), *parts[2:]) if parts[0] == "cameras" and len(parts) > 1 else parts
            table += (str(counts[table]),) if match[1] == "[[" else ()
            counts[parts] += 1
        found.setdefault(table if match[1] else table + parts, number)
    return found


def _assignment(text: str) -> dict[str, Any]:
    """Parse text such as ``server.max_rate=30`` into a table; the value is TOML or unquoted text. Raises UserError."""
    name, equals, value = text.partition("=")
    for line in (text, f"{name}={json.dumps(value.strip())}") if equals else ():
        with suppress(tomllib.TOMLDecodeError):
            return tomllib.loads(line)
    raise UserError(f"--set {text}: must be KEY=VALUE, for example server.max_rate=30")


def _put(values: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        if not isinstance(value, Mapping):
            values |= {} if value is None else {name: value}
        elif isinstance(table := values.setdefault(name, {}), dict):
            _put(table, value)
        else:
            raise UserError(f"{name}: is a table; set {name}.KEY=VALUE")
