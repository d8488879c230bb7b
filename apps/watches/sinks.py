"""Send events to standard output, a webhook, a program, or any service that apprise supports."""

from __future__ import annotations

import inspect
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import count
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from edgevlm.apps.credentials import mask_credentials, secret
from edgevlm.apps.names import Id
from edgevlm.apps.proxies import environment_problem, proxies_for
from edgevlm.apps.watches.events import WatchEvent
from edgevlm.errors import UserError, nearest
from edgevlm.packages import needs
from edgevlm.runtime.plugins import load_class
from edgevlm.runtime.snapshots.writer import ago

SECRET_OPTIONS = ("password", "secret", "token", "key")  # options whose value must be env:NAME or file:PATH
SECRET_VARIABLE = "EDGEVLM_WEBHOOK_SECRET"
ANSWER_S = 10.0  # timeout for a webhook or a broker, seconds
PROGRAM_S = 30.0
Seconds = Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class WatchStatus:
    """The state of a watch on a camera.

    ``camera`` and ``watch``: ids. ``camera_name`` and ``watch_name``: the displayed names, or None. ``state``: None until the
    state is known. ``device_class``: the sensor's class in Home Assistant.
    """

    camera: str
    watch: str
    question: str
    state: Literal["open", "close"] | None = None
    paused: bool = False
    device_class: str | None = None
    camera_name: str | None = None
    watch_name: str | None = None


@dataclass(frozen=True, slots=True)
class Program:
    """The identity of the program that sends the events.

    ``id``: a unique id, which stays the same after a restart. ``page``: the address of the server's web page. ``shared``:
    whether all nodes of a cluster use the same id.
    """

    id: str = ""
    page: str = ""
    shared: bool = False


class Sink:
    """A receiver of events.

    A single thread calls :meth:`send`, in the order of the events. Any thread may call the other methods. Packages add sinks
    with entry points in the group ``edgevlm.sinks``. The constructor receives the options from the sink's table of edgevlm.toml
    as keyword arguments. The constructor raises UserError for invalid options, and opens no connection.
    """

    control: Callable[[str, str, bool], object] = staticmethod(lambda camera, watch, active: None)
    """Call it to pause a watch on a camera, or to let it continue."""
    program = Program()
    """Set before :meth:`start`."""

    def start(self) -> None:
        """Connect, if the sink needs a connection before the first event."""

    def send(self, event: WatchEvent, pictures: Sequence[bytes]) -> None:
        """Send an event, and return once the receiver has accepted it. ``event.line()`` is the event's JSON.

        If :meth:`send` raises an exception, the event is sent again later.
        """
        raise NotImplementedError

    def announce(self, watches: Sequence[WatchStatus]) -> None:
        """Called with all watches whenever a watch is added, removed or changed. Must not block."""

    def close(self) -> None:
        """Close connections."""


class Stdout(Sink):
    """A sink that prints JSON lines on standard output."""

    def send(self, event: WatchEvent, pictures: Sequence[bytes]) -> None:
        print(event.line(), file=sys.stdout, flush=True)


class Webhook(Sink):
    """A sink that posts an event's JSON. With a secret, requests are signed as https://www.standardwebhooks.com specifies.

    ``secret``: ``whsec_`` followed by base64, or any text. The default is the value of the environment variable
    SECRET_VARIABLE. Redirects are not followed.
    """

    def __init__(self, url: str, secret: str = "", timeout: Seconds = ANSWER_S) -> None:
        with needs("sink webhook", "serve"):
            import httpx
            import standardwebhooks
        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL:
            parsed = httpx.URL()
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise UserError(f"webhook {mask_credentials(url)}: invalid URL; use one like https://HOST/PATH")
        self._url, self._shown = parsed, f"{parsed.scheme}://{parsed.netloc.decode().rpartition('@')[2]}"
        secret, self._signer = secret or os.environ.get(SECRET_VARIABLE, ""), None
        if secret:
            try:
                self._signer = standardwebhooks.Webhook(secret if secret.startswith("whsec_") else secret.encode())
            except (ValueError, RuntimeError, standardwebhooks.webhooks.EmptyWebhookSecretError):
                raise UserError("webhook: the secret after whsec_ is not valid base64") from None
        verify = parsed.scheme == "https"
        try:
            direct = None if proxies_for(parsed.host) else httpx.HTTPTransport(verify=verify)
            self._client = httpx.Client(timeout=timeout, follow_redirects=False, verify=verify, transport=direct)
        except (OSError, ValueError, ImportError) as error:
            raise UserError(f"webhook {self._shown}: {environment_problem(error) or error}") from None

    def send(self, event: WatchEvent, pictures: Sequence[bytes]) -> None:
        import httpx

        body, now = event.line(), datetime.now(timezone.utc)
        stamp = str(int(now.timestamp()))
        headers = {"content-type": "application/json", "webhook-id": event.id, "webhook-timestamp": stamp}
        if self._signer is not None:
            headers["webhook-signature"] = self._signer.sign(event.id, now, body)
        try:
            with self._client.stream("POST", self._url, content=body, headers=headers) as response:
                status = response.status_code
        except httpx.HTTPError as error:
            raise UserError(f"{self._shown} cannot be reached ({error or type(error).__name__})") from None
        if not 200 <= status < 300:
            where = "; redirects are not followed" if 300 <= status < 400 else ""
            raise UserError(f"{self._shown} returned {status}{where}")

    def close(self) -> None:
        self._client.close()


class Exec(Sink):
    """A sink that runs a program for each event, without a shell. The program receives the event's JSON on stdin.

    Exit status 0 means success. The program's output goes to stderr. After ``timeout`` seconds the program is killed.
    """

    def __init__(self, command: str, timeout: Seconds = PROGRAM_S) -> None:
        try:
            self._arguments = shlex.split(command)
        except ValueError as error:
            raise UserError(f"exec {command}: cannot be parsed ({error})") from None
        if not self._arguments or shutil.which(self._arguments[0]) is None:
            raise UserError(f"exec {command}: program not found; give its full path")
        self._timeout = timeout

    def send(self, event: WatchEvent, pictures: Sequence[bytes]) -> None:
        name = self._arguments[0]
        try:
            process = subprocess.Popen(self._arguments, stdin=subprocess.PIPE, stdout=2, start_new_session=True)
        except OSError as error:
            raise UserError(f"{name} cannot be run ({error.strerror})") from None
        with process:
            try:
                process.communicate(event.line().encode() + b"\n", self._timeout)
            except subprocess.TimeoutExpired:
                raise UserError(f"{name} timed out after {self._timeout:g} s") from None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if process.returncode:
            raise UserError(f"{name} exited with {process.returncode}")


class Apprise(Sink):
    """A sink that sends a text and a picture to any service that apprise supports: https://appriseit.com."""

    def __init__(self, url: str) -> None:
        self._names: dict[str, str | None] = {}  # camera names by id
        with needs("sink apprise", "apprise"):
            import apprise
        logging.getLogger("apprise").disabled = True  # apprise logs addresses, which may contain secrets
        self._apprise = apprise.Apprise()
        if not self._apprise.add(url):
            raise UserError(f"apprise: {url.partition('://')[0]}:// is not supported; see https://appriseit.com")

    def send(self, event: WatchEvent, pictures: Sequence[bytes]) -> None:
        from apprise.attachment.memory import AttachMemory

        attached = AttachMemory(pictures[0], name=f"{event.id}.jpg", mimetype="image/jpeg") if pictures else None
        title, body = in_words(event, self._names.get(event.camera))
        if not self._apprise.notify(body, title, attach=attached):
            raise UserError("the service did not accept the message")

    def announce(self, watches: Sequence[WatchStatus]) -> None:
        self._names = {each.camera: each.camera_name for each in watches}


def in_words(event: WatchEvent, camera: str | None = None) -> tuple[str, str]:
    """Return a message about an event: a title and one line. ``camera``: the camera's displayed name."""
    what = f"Opened at {{}}, with probability {event.probability:.2f}."
    if event.state == "close":
        what = f"Closed at {{}}, after {ago(max(0.0, event.time - event.opened))}."
    return f"{camera or event.camera}: {event.question or event.watch}", what.format(
        f"{datetime.fromtimestamp(event.time):%H:%M:%S}"
    )


class SinkSettings(BaseModel):
    """A ``[[sinks]]`` table of edgevlm.toml. Other keys are options of the sink.

    ``kind``: stdout, webhook, mqtt, apprise, exec, a kind from a package, or ``./file.py:Class``. ``name``: the sink's name, by
    default the kind.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    __pydantic_extra__: dict[str, str | int | float | bool]

    kind: Annotated[str, StringConstraints(min_length=1, max_length=1000)]
    name: Id | None = None


def open_sinks(settings: Iterable[SinkSettings]) -> dict[str, Sink]:
    """Return the configured sinks by name, without connecting them. Raises a UserError that names the sink."""
    sinks: dict[str, Sink] = {}
    for each in settings:
        name = each.name or unused(each.kind if each.kind.isidentifier() else "sink", sinks)
        if name in sinks:
            raise UserError(f"sinks: duplicate name {name!r}; rename one")
        try:
            sinks[name] = open_sink(each.kind, each.__pydantic_extra__)
        except UserError as error:
            raise UserError(f"sinks.{name}: {error}") from None
    return sinks


def unused(name: str, taken: Mapping[str, object]) -> str:
    return next(found for number in count(1) if (found := name if number == 1 else f"{name}-{number}") not in taken)


def open_sink(kind: str, options: Mapping[str, Any]) -> Sink:
    """Open a sink of the given kind. An option's value may be read from ``env:NAME`` or ``file:PATH``. Raises UserError."""
    found, given = load_class("sinks", kind), {}
    parameters = inspect.signature(found, eval_str=True).parameters
    for name, value in options.items():
        if name not in parameters:
            raise UserError(f"{name}: unknown option; {nearest(name, parameters)}")
        if any(part in name for part in SECRET_OPTIONS) and not str(value).startswith(("env:", "file:")):
            raise UserError(f"{name}: must not be in the file itself; use env:NAME or file:PATH")
        annotation = parameters[name].annotation
        try:
            given[name] = TypeAdapter(Any if annotation is inspect.Parameter.empty else annotation).validate_python(value)
        except ValidationError as error:
            raise UserError(f"{name}: {error.errors(include_url=False)[0]['msg']}") from None
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in options:
            raise UserError(f"{name}: is missing")
    return found(**{name: secret(value) if isinstance(value, str) else value for name, value in given.items()})
