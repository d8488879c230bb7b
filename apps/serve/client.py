"""Query a running server: ``edgevlm ask``, ``digest``, ``journal`` and ``forget``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from edgevlm.apps.credentials import mask_credentials, secret
from edgevlm.apps.run.clock import NOW_S, clock_time, moment
from edgevlm.apps.run.output import NO_FIT, wall_clock
from edgevlm.apps.schemas import json_line
from edgevlm.errors import UserError
from edgevlm.progress import to_stderr, to_stdout
from edgevlm.runtime.snapshots.writer import ago

TIMEOUT_S = 600.0


def questions(typed: str | None) -> Iterator[str]:
    """Yield the typed question or, if it is None or ``-``, each non-empty line of stdin.

    Raises UserError if stdin is a terminal.
    """
    if typed not in (None, "-"):
        yield str(typed)
        return
    if sys.stdin.isatty():
        raise UserError("the question is missing; add it: edgevlm ask 'who came in?'")
    for line in sys.stdin.buffer:
        if line.strip():
            yield line.decode(errors="replace").strip()


def ask_server(
    question: str, stream: str | None, url: str, key_file: Path | None, as_json: bool, window: dict[str, str] | None = None
) -> None:
    """Ask a server, print the answer as it arrives, and say when old evidence was seen. Raises UserError."""
    body = {"model": stream or "", "stream": True, "messages": [{"role": "user", "content": question}], **(window or {})}
    text, extension = "", dict[str, Any]()
    with replied(url, key_file, "/v1/chat/completions", body) as response:
        for line in response.iter_lines():
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                break
            if not line.startswith("data:"):
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise UserError(f"{mask_credentials(url)}: {chunk['error']['message']}")
            extension = chunk.get("edgevlm", extension)
            for choice in chunk["choices"]:
                piece = choice["delta"].get("content") or ""
                text += piece
                if not as_json:
                    to_stdout(piece, end="")
        else:
            raise UserError(f"{mask_credentials(url)}: the server closed the connection during the answer; ask again")
        if as_json:
            fields = {
                name: extension.get(name) for name in ("stream", "time_s", "ttft_ms", "evidence_held", "model_fits_source")
            }
            fields |= {"question": question, "text": text, "evidence": extension.get("evidence") or []}
            print(json_line("completion", {"time": wall_clock(), **fields}), flush=True)
            return
        to_stdout()
        if extension.get("model_fits_source") is False:
            to_stderr(NO_FIT)
        held, moments, now = extension.get("evidence_held"), extension.get("evidence"), time.time()
        if held is False:
            to_stderr("the frames with the answer are no longer in memory")
        elif held and moments and moments[0]["time"] is not None:
            at = moment(moments[0]["time"]) + moments[0]["until_s"] - moments[0]["time_s"]
            if now - at >= NOW_S:
                to_stderr(f"seen {clock_time(at, now)}")


def forget_served(url: str, body: Mapping[str, Any], key_file: Path | None) -> dict[str, Any]:
    """Make a server delete what was seen in a period, and return the number of deleted items by camera and kind."""
    with replied(url, key_file, "/v1/forget", {**body, "confirm": True}) as response:
        done = json.loads(response.read())
        if waiting := done.get("waiting"):
            to_stderr(f"unavailable now, will delete once available again: {', '.join(waiting)}")
        return dict(done["streams"])


def show_digest(window: Mapping[str, str], url: str, key_file: Path | None, as_json: bool) -> None:
    """Print the openings of watches and the journal lines in a period, with picture addresses, oldest first.

    Raises a one-line UserError.
    """
    with replied(url, key_file, "/v1/digest", query=window) as response:
        found = json.loads(response.read())
        for each in found["data"]:
            if as_json:
                print(json_line(each["event"], each))
                continue
            at, what = each.get("time") or each["opened"], each.get("text")
            if what is None:
                how_long = "still open" if each["seconds"] is None else f"for {ago(each['seconds'])}"
                what = f"{each['question'] or each['watch']}  {how_long} ({each['probability']:.2f})"
            to_stdout(f"{clock_time(moment(at))}  {each['camera']}  {what}")
            for seen in [seen for seen in each["evidence"] if seen.get("jpeg_url")][:1]:
                to_stdout(f"  {mask_credentials(url).rstrip('/')}{seen['jpeg_url']}")
        if not found["data"]:
            to_stderr(f"nothing happened since {clock_time(moment(found['since']))}: no watch was open and no line was written")


def journal_of(url: str, query: Mapping[str, str], key_file: Path | None) -> list[dict[str, Any]]:
    """Return lines of a server's journal, newest first. Raises a one-line UserError."""
    with replied(url, key_file, "/v1/journal", query=query) as response:
        return list(json.loads(response.read())["data"])


@contextmanager
def replied(
    url: str, key_file: Path | None, path: str, body: Mapping[str, Any] | None = None, query: Mapping[str, str] | None = None
) -> Iterator[httpx.Response]:
    """Send a POST request or, without ``body``, a GET request, and yield the reply.

    Errors become one-line UserErrors, including errors in the ``with`` block.
    """
    shown, method, headers = mask_credentials(url), "GET" if body is None else "POST", {}
    if key_file is not None:
        key = secret(f"file:{key_file}")
        if not (key.isascii() and key.isprintable()):
            raise UserError(f"--key-file {key_file}: must contain one line of ASCII text")
        headers["authorization"] = f"Bearer {key}"
    try:
        address = (url if "://" in url else f"http://{url}").rstrip("/") + path
        with (
            httpx.Client(timeout=TIMEOUT_S, trust_env=False) as client,
            client.stream(method, address, json=body, params=query, headers=headers) as response,
        ):
            if response.status_code == 200:
                yield response
            else:
                why = json.loads(response.read())["error"]["message"]
                if response.status_code == 401:
                    why = (
                        "the server requires a key; add --key-file FILE"
                        if key_file is None
                        else f"the key in {key_file} is wrong"
                    )
                raise UserError(f"{shown}: {why}")
    except (httpx.InvalidURL, httpx.UnsupportedProtocol):
        raise UserError(f"--url {shown}: invalid URL; use one like http://127.0.0.1:8000") from None
    except (OSError, httpx.HTTPError) as error:
        raise UserError(f"{shown}: no answer ({error}); check that edgevlm serve is running there") from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        raise UserError(f"{shown}: not an edgevlm server; set --url to the server's address") from None
