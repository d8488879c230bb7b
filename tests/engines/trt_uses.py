"""What our code uses of TensorRT, read from its syntax: variables annotated with a class of TensorRT are of that class."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MODULE = "trt"


@dataclass(frozen=True)
class Use:
    """A member of a class, and how it is used: ``call`` with so many arguments, ``read`` or ``write``."""

    kind: str
    member: str
    how: str
    arguments: int
    line: int


def uses_of(path: Path, members: set[str]) -> tuple[list[Use], list[str]]:
    """Every use in a file; and accesses to what is called like one of ``members`` on something that has no known class."""
    tree = ast.parse(path.read_text())
    for parent in ast.walk(tree):
        for child in ast.iter_child_nodes(parent):
            child.parent = parent  # type: ignore[attr-defined]
    found: list[Use] = []
    unknown: list[str] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        base = ast.unparse(node.value)
        if base == MODULE or node.attr == "__class__":
            continue
        kind = _class_of(node)
        if kind is not None and kind.startswith(f"{MODULE}."):
            found.append(_use(kind.removeprefix(f"{MODULE}."), node.attr, node))
        elif kind is None and node.attr in members:
            unknown.append(f"line {node.lineno}: {base}.{node.attr}")
    return [*found, *_constructed(tree)], unknown


def overrides_of(path: Path) -> dict[str, dict[str, int]]:
    """Classes of TensorRT that a file derives from: the methods of each that it gives, and their parameters after self."""
    found: dict[str, dict[str, int]] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            if (name := ast.unparse(base)).startswith(f"{MODULE}."):
                methods = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name[0] != "_"]  # type: ignore[attr-defined]
                found[name.removeprefix(f"{MODULE}.")] = {method.name: len(method.args.args) - 1 for method in methods}
    return found


def _constructed(tree: ast.AST) -> Iterator[Use]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func).startswith(f"{MODULE}.")
            and isinstance(node.func, ast.Attribute)
        ) and ast.unparse(node.func.value) == MODULE:
            yield Use(node.func.attr, "__init__", "call", len(node.args) + len(node.keywords), node.lineno)


def _use(kind: str, member: str, node: ast.Attribute) -> Use:
    parent = node.parent  # type: ignore[attr-defined]
    if isinstance(parent, ast.Call) and parent.func is node:
        arguments = len(parent.args) + len(parent.keywords)
        is_unbound = ast.unparse(node.value) == f"{MODULE}.{kind}"  # Class.method(self, ...)
        return Use(kind, member, "call", arguments - is_unbound, node.lineno)
    return Use(kind, member, "write" if isinstance(node.ctx, ast.Store) else "read", 0, node.lineno)


def _class_of(node: ast.Attribute) -> str | None:
    """The class that stands before the dot: itself, or as its variable is annotated; None where nothing says so."""
    base = ast.unparse(node.value)
    if base.startswith(f"{MODULE}.") and base.count(".") == 1:
        return base
    scope: ast.AST | None = node
    while scope is not None:
        scope = getattr(scope, "parent", None)
        if isinstance(scope, ast.FunctionDef | ast.ClassDef | ast.Lambda) and (said := _annotation(scope, base)):
            return said
    return None


def _annotation(scope: ast.AST, name: str) -> str | None:
    for node in ast.walk(scope):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            return ast.unparse(node.annotation).removesuffix(" | None")
        if isinstance(node, ast.arg) and node.arg == name and node.annotation is not None:
            return ast.unparse(node.annotation).removesuffix(" | None")
    return None
