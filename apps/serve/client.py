"""What a running server answers to ``edgevlm ask``, ``digest``, ``journal`` and ``forget``, with the standard library alone."""

from __future__ import annotations

import http.client
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from edgevlm.apps.credentials import mask_credentials
from edgevlm.apps.run.clock import NOW_S, clock_time
from edgevlm.apps.run.events import wall_clock
from edgevlm.apps.schemas import json_line
from edgevlm.errors import UserError
from edgevlm.progress import to_stderr
from edgevlm.runtime.snapshots.capture import ago

TIMEOUT_S = 600.0
MAX_DIGEST = 64 << 20  # bytes


def questions(typed: str | None) -> Iterator[str]:
    """The one typed, or stdin's, one a line."""
    if typed not in (None, "-"):
        yield str(typed)
        return
    if sys.stdin.isatty():
        raise UserError("give a question: edgevlm ask 'who came in?'")
    for line in sys.stdin.buffer:
        if line.strip():
            yield line.decode(errors="replace").strip()


def ask_server(
    question: str, stream: str | None, url: str, key_file: Path | None, as_json: bool, window: dict[str, str] | None = None
) -> None:
    """Print the answer as it comes, and on stderr when what it was read from was seen. Raises UserError, one line.

    window: ``since`` and ``until`` as typed.
    """
    body = {"model": stream or "", "stream": True, "messages": [{"role": "user", "content": question}], **(window or {})}
    pieces: list[str] = []
    extension: dict[str, Any] = {}
    with understood(url):
        for chunk in chunks(url, body, key_file):
            extension = chunk.get("edgevlm", extension)
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content") or ""
                pieces.append(piece)
                if not as_json:
                    sys.stdout.write(piece)
                    sys.stdout.flush()
        if as_json:
            told = {name: extension.get(name) for name in ("stream", "time_s", "ttft_ms", "evidence", "evidence_held")}
            told["evidence"] = told["evidence"] or []
            fields = {"time": wall_clock(), "question": question, "text": "".join(pieces), **told}
            print(json_line("completion", fields), flush=True)
        else:
            print(flush=True)
            if line := seen(extension):
                to_stderr(line)


def seen(extension: dict[str, Any]) -> str:
    """When what an answer was read from was seen, in words; empty where that is now, or nobody knows."""
    held, moments, now = extension.get("evidence_held"), extension.get("evidence"), time.time()
    if held is False:
        return "what would answer this is no longer in memory"
    if held is None or not moments or moments[0]["time"] is None:
        return ""
    at = seconds_of(moments[0]["time"])
    at += moments[0]["until_s"] - moments[0]["time_s"]
    return f"seen {clock_time(at, now)}" if now - at >= NOW_S else ""


def forget_served(url: str, body: dict[str, Any], key_file: Path | None) -> dict[str, Any]:
    """What a server has deleted, by camera. Raises UserError, one line."""
    with asked(url, "/v1/forget", {**body, "confirm": True}, key_file) as response:
        told = json.load(response)
        if waiting := told.get("waiting"):
            to_stderr(f"still to be forgotten, once they are back: {', '.join(waiting)}")
        streams: dict[str, Any] = told["streams"]
        return streams


def show_digest(window: dict[str, str], url: str, key_file: Path | None, as_json: bool) -> None:
    """Print what happened, by time: when watches were open, lines of the journal, and the address of a picture.

    window: ``since``, ``until``, ``camera`` and ``search``. Raises UserError, one line.
    """
    with asked(url, f"/v1/digest?{urlencode(window)}", None, key_file) as response:
        found = json.loads(response.read(MAX_DIGEST))
        for each in found["data"]:
            print(json_line(each["event"], each) if as_json else told(each, url))
        if not found["data"]:
            to_stderr(
                f"nothing happened since {clock_time(seconds_of(found['since']))}: no watch was open, no line was written"
            )


def told(each: dict[str, Any], url: str) -> str:
    """An entry of a digest for people."""
    at = clock_time(seconds_of(each["time" if each["event"] == "line" else "opened"]))
    if each["event"] == "line":
        what = each["text"]
    else:
        how_long = "still open" if each["seconds"] is None else f"for {ago(each['seconds'])}"
        what = f"{each['question'] or each['watch']}  {how_long} ({each['probability']:.2f})"
    pictures = [seen["jpeg_url"] for seen in each["evidence"] if seen.get("jpeg_url")]
    return f"{at}  {each['camera']}  {what}" + (f"\n  {mask_credentials(url).rstrip('/')}{pictures[0]}" if pictures else "")


def seconds_of(text: str) -> float:
    """Seconds since 1970 of a time as JSON has it."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def journal_of(url: str, query: dict[str, str], key_file: Path | None) -> list[dict[str, Any]]:
    """Lines of a server's journal, newest first. Raises UserError, one line."""
    with asked(url, f"/v1/journal?{urlencode(query)}", None, key_file) as response:
        lines: list[dict[str, Any]] = json.load(response)["data"]
        return lines


def chunks(url: str, body: dict[str, Any], key_file: Path | None) -> Iterator[dict[str, Any]]:
    """The chunks of a streamed completion."""
    with asked(url, "/v1/chat/completions", body, key_file) as response:
        for line in response:
            data = line.decode(errors="replace").strip().removeprefix("data:").strip()
            if data == "[DONE]":
                return
            if line.startswith(b"data:"):
                chunk = json.loads(data)
                if "error" in chunk:
                    raise UserError(f"{mask_credentials(url)}: {chunk['error']['message']}")
                yield chunk
        raise UserError(f"{mask_credentials(url)}: the server went away in the middle of an answer; ask again")


@contextmanager
def asked(url: str, path: str, body: dict[str, Any] | None, key_file: Path | None) -> Iterator[http.client.HTTPResponse]:
    """The answer to a POST, to a GET where there is no body. Raises UserError, one line, also for what is read of it inside."""
    shown = mask_credentials(url)
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host = (parts.hostname or "").encode("idna").decode()
        kind = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}[parts.scheme if host else ""]
        connection = kind(host, parts.port, timeout=TIMEOUT_S)
    except (ValueError, KeyError, http.client.InvalidURL):
        raise UserError(f"--url {shown}: give an address like http://127.0.0.1:8000") from None
    headers = {"content-type": "application/json", "accept": "text/event-stream"}
    if key_file is not None:
        try:
            key = key_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--key-file {key_file}: cannot be read ({error})") from None
        if not (key.isascii() and key.isprintable()):
            raise UserError(f"--key-file {key_file}: is no key; it has more than one line of ASCII")
        headers["authorization"] = f"Bearer {key}"
    try:
        method = "GET" if body is None else "POST"
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise UserError(f"{shown}: {problem(response)}")
        with understood(url):
            yield response
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"{shown}: no answer ({error}); is `edgevlm serve` running there?") from None
    finally:
        connection.close()


@contextmanager
def understood(url: str) -> Iterator[None]:
    """Raises UserError, one line, for a reply that is not as our servers send it."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        raise UserError(f"{mask_credentials(url)}: this is no edgevlm server") from None


def problem(response: http.client.HTTPResponse) -> str:
    """A refusal's own words."""
    try:
        return str(json.loads(response.read(65_536))["error"]["message"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return f"{response.status} {response.reason}"
