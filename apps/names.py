"""Make ids for programs, cameras and watches from names in any script."""

from __future__ import annotations

import hashlib
import platform
import re
import unicodedata
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

from pydantic import AfterValidator, BeforeValidator, StringConstraints, WithJsonSchema

from edgevlm.runtime.files import atomic_write, private_folder

ID = r"^[a-z0-9][a-z0-9_-]{0,63}$"
HASHED = 55  # maximum number of characters in an id before its hash
MAX_NAME = 100


def printable(name: str) -> str:
    """Strip blanks from both ends of a name. Raises ValueError if the name is empty, too long or unprintable."""
    if not (name := name.strip()) or len(name) > MAX_NAME or not name.isprintable():
        raise ValueError(f"{name!r}: give a name of 1 to {MAX_NAME} printable characters")
    return name


def named_id(name: Any) -> Any:
    """Make an id from a name, as a pydantic validator."""
    return id_of(printable(name)) if isinstance(name, str) else name


TEXT = WithJsonSchema({"type": "string", "minLength": 1, "maxLength": MAX_NAME})
Id = Annotated[str, StringConstraints(pattern=ID)]
Name = Annotated[str, AfterValidator(printable), TEXT]
NamedId = Annotated[Id, BeforeValidator(named_id), TEXT]  # an id, made from a name if necessary


def id_of(name: str) -> str:
    """Make an id from a name. A valid id stays unchanged; any other name becomes its ASCII words and a hash."""
    name = unicodedata.normalize("NFC", name.strip())
    if re.fullmatch(ID, name):
        return name
    return f"{slug(unicodedata.normalize('NFKD', name))[:HASHED].rstrip('-')}-{short_hash(name)}".lstrip("-")


def short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def slug(text: str) -> str:
    """Join the ASCII words of a text, as in ``is-there-a-red-square``."""
    text = "".join(each for each in text if not unicodedata.combining(each))
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def program_id(folder: Path, new: str = "") -> str:
    """Return the program's id stored in a state folder; if the folder has no id yet, store ``new`` or a random id."""
    path = folder / "program.id"  # the dot distinguishes this file from cameras' folders
    with suppress(OSError, ValueError):
        if re.fullmatch("[0-9a-f]{8}", found := path.read_text().strip()):
            return found
    made = new or uuid4().hex[:8]
    try:
        private_folder(folder)
        with atomic_write(path, private=True) as stream:
            stream.write(made.encode())
    except OSError:  # without a file, derive an id that is the same every time
        return new or short_hash(f"{platform.node()} {folder.resolve()}")
    return made
