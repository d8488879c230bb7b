"""Find classes and functions by name in edgevlm, in installed packages and in users' files.

A name is looked up in a group of :data:`GROUPS`. Edgevlm and other packages declare names as entry points::

    [project.entry-points."edgevlm.policies"]
    my-policy = "my_package.policies:MyPolicy"

Alternatively, ``./mine.py:MyPolicy`` names a class in a file, which need not be installed. Every failure raises a one-line
:class:`~edgevlm.errors.UserError`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import EntryPoint, distributions, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from edgevlm.errors import UserError, nearest
from edgevlm.packages import needs

_FILE = re.compile(r"(?P<path>.*\.py)(?::(?P<name>[^:]*))?(?::(?P<options>.*))?", re.DOTALL)
IN_FILE = "(or a class in a file, as ./mine.py:Mine)"
GROUPS = {
    "backbones": "Read a text model's decoder.",
    "engines": "Run a bundle's graphs on a backend.",
    "families": "Read a model family's checkpoints.",
    "models": "Find the bundle that a model's name stands for.",
    "policies": "Choose which tokens stay in the KV cache.",
    "precisions": "Write a decoder's weights.",
    "sinks": "Deliver the events of watches.",
    "sources": "Open cameras and recordings.",
}


def names(group: str, *, own: bool = False) -> list[str]:
    """Return the sorted names in a group, edgevlm's own first. ``own``: return only edgevlm's names."""
    ours = sorted(_own(group))
    return ours if own else ours + sorted({point.name for point in entry_points(group=f"edgevlm.{group}")} - set(ours))


def load_class(group: str, name: str) -> Any:
    """Return a class by its name in a group, preferring edgevlm's own. ``name``: may also be ``./file.py:Class``. Raises
    UserError.
    """
    if is_file(name):
        return _from_file(name)
    point = _own(group).get(name) or next(iter(entry_points(group=f"edgevlm.{group}", name=name)), None)
    kind = f"{group[:-3]}y" if group.endswith("ies") else group[:-1]
    if point is None:
        raise UserError(f"unknown {kind} {name!r}; {nearest(name, names(group))} {IN_FILE}")
    with needs(f"{kind} {name}", "".join(point.extras)):
        try:
            return point.load()
        except AttributeError as error:
            raise UserError(f"{kind} {name}: {point.value} cannot be loaded ({error}); install its package again") from error


def is_file(name: str) -> bool:
    """Return whether a name has the form ``file.py:Class``, with or without settings."""
    return bool(_FILE.fullmatch(name))


def split_options(text: str) -> tuple[str, str]:
    """Split ``name:options`` or ``file.py:Class:options`` into the name and the options, which may be empty."""
    found = _FILE.fullmatch(text)
    if found is None:
        name, _, options = text.partition(":")
        return name, options
    return ":".join(filter(None, [found["path"], found["name"]])), found["options"] or ""


@contextmanager
def blamed(what: str, plugin: Any, kind: type[UserError] = UserError) -> Iterator[None]:
    """Turn an error in a plugin's file into a UserError with file, line and error.

    ``plugin``: a class, instance or function. ``kind``: the class of error to raise. Errors in edgevlm's own classes, and
    errors whose traceback does not include the plugin's file, are raised unchanged.
    """
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        path = getattr(sys.modules.get(plugin.__module__), "__file__", None)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        if not is_foreign(plugin) or not lines:
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise kind(f"{what} failed: {path}, line {lines[-1]}: {reason} (EDGEVLM_DEBUG=1 shows the traceback)") from error


def is_foreign(plugin: Any) -> bool:
    """Return whether a class, instance or function comes from outside edgevlm."""
    return not plugin.__module__.startswith("edgevlm.")


def place(function: Any) -> str:
    """Return the source location of a function or class as ``file, line N``, or an empty string if it is unknown."""
    try:
        return f"{inspect.getsourcefile(function)}, line {inspect.getsourcelines(function)[1]}"
    except (OSError, TypeError):
        return ""


@cache
def _own(group: str) -> dict[str, EntryPoint]:
    """Return edgevlm's own entry points, preferring installed ones to a stale ``edgevlm.egg-info`` beside the sources."""
    found = [each for each in distributions(name="edgevlm") if each.entry_points.select(group=f"edgevlm.{group}")]
    found.sort(key=lambda each: each.read_text("METADATA") is None)  # an egg-info has no file METADATA
    return {point.name: point for point in found[0].entry_points.select(group=f"edgevlm.{group}")} if found else {}


def _from_file(text: str) -> Any:
    found = _FILE.fullmatch(text)
    assert found is not None
    path, name = Path(found["path"]).expanduser(), found["name"]
    if not path.is_file():
        raise UserError(f"{path}: file not found")
    module = _module(path.resolve())
    classes = [
        key for key, value in vars(module).items() if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    if not name:
        raise UserError(f"{path}: add a class name; {nearest('', [f'{path}:{known}' for known in classes])}")
    if not hasattr(module, name):
        raise UserError(f"{path} has no {name!r}; {nearest(name, classes)}")
    return getattr(module, name)


def _module(path: Path) -> ModuleType:
    """Import a file as a module that dataclasses and pickle can find by name. Later calls for a file return the same module."""
    name = f"edgevlm_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception):
            raise
        line = error.lineno if isinstance(error, SyntaxError) else traceback.extract_tb(error.__traceback__)[-1].lineno
        reason = " ".join(str(error).split())
        raise UserError(f"{path}, line {line}: {type(error).__name__}: {reason}") from error
    return module
