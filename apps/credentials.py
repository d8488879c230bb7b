"""Hide passwords and keys from messages, logs and the process list."""

from __future__ import annotations

import ctypes
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from edgevlm.errors import UserError

if TYPE_CHECKING:
    from edgevlm.runtime.snapshots.directory import SnapshotKey

ARGUMENTS = slice(45, 47)  # arg_start and arg_end, fields 48 and 49 in proc(5), counted after the process name


def mask_argv() -> None:
    """Try to overwrite the credentials in this process's arguments, so that ``ps`` does not show them."""
    with suppress(OSError, ValueError):
        start, end = map(int, Path("/proc/self/stat").read_text().rpartition(") ")[2].split()[ARGUMENTS])
        if not 0 < start < end:
            return
        shown = ctypes.string_at(start, end - start)
        arguments = [_mask(part.decode(errors="surrogateescape")) for part in shown.split(b"\0")]
        masked = "\0".join(arguments).encode(errors="surrogateescape")
        if masked != shown:
            ctypes.memmove(start, masked[: end - start].ljust(end - start, b"\0"), end - start)


NAMED = re.compile("key|token|pas|pwd|psw|secret|auth", re.IGNORECASE)  # names of URL parameters that hold secrets
PARAMETER = re.compile(r"(?<![\w-])([\w-]+)=")
VALUE = re.compile(r"[^&;\s]*[^&;\s:]")
# matches up to a URL's last @, because passwords may contain @ or /; one slash may be missing, because pathlib.Path drops one
LOGIN = re.compile(r"(?<![\w+.-])([\w+.-]+:/{1,2})\S*@")
SETTING = re.compile(
    r"(?i)(\b(?:user-id|user-pw|password|passwd|pwd|secret|token|api[-_]?key)\s?=\s?)(?:\"[^\"]*\"|[^&;\s]*[^&;\s:])"
)


def mask_credentials(text: str) -> str:
    """Replace each URL's user and password, and each value whose name suggests a secret, with ``***``.

    Bytes that are not UTF-8, as in file names, are escaped.
    """
    return _mask(text).encode(errors="backslashreplace").decode()


def _mask(text: str) -> str:
    return SETTING.sub(r"\1***", _mask_parameters(LOGIN.sub(r"\1***@", text)))


def _mask_parameters(text: str) -> str:
    masked, end = "", 0
    for found in PARAMETER.finditer(text):
        name = found[1]
        if text[max(0, found.start() - 1) : found.start()] not in ("?", "&", ";", "/"):
            name = name.partition("_")[2]  # some cameras' addresses contain user=admin_password=...
        if found.start() >= end and NAMED.search(name) and (value := VALUE.match(text, found.end())):
            masked, end = f"{masked}{text[end : found.end()]}***", value.end()
    return masked + text[end:]


def with_login(address: str, username: str | None, password: str | None) -> str:
    """Add a username and password to a camera's address. Raises UserError if the address already contains a login."""
    if username is None and password is None:
        return address
    scheme, found, rest = address.partition("://")
    if not found or "@" in rest.partition("/")[0]:
        raise UserError("username and password require an address without a login, like rtsp://HOST/PATH")
    return f"{scheme}://{quote(username or '', safe='')}:{quote(password or '', safe='')}@{rest}"


def state_key(reference: str | None) -> SnapshotKey | None:
    """Return the key that encrypts snapshots. ``reference``: the key, or where :func:`secret` reads it. Raises UserError."""
    from edgevlm.runtime.snapshots.directory import SnapshotKey

    return None if reference is None else SnapshotKey(secret(reference))


def secret(reference: str) -> str:
    """Return the secret that ``env:NAME`` or ``file:PATH`` refers to, or any other text unchanged. Raises UserError."""
    kind, _, name = reference.partition(":")
    if kind == "env" and re.fullmatch(r"\w+", name):
        if name not in os.environ:
            raise UserError(f"{reference}: environment variable {name} is not set")
        return os.environ[name]
    if kind == "file":
        try:
            if not Path(name).is_file():
                raise UserError(f"{reference}: file not found")
            with Path(name).open(encoding="utf-8") as file:
                return file.read(65_536).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{reference}: cannot be read ({error})") from None
    return reference
