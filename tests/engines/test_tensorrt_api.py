"""Every class, member and argument count of TensorRT that our code uses is there in each version that it is written for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from trt_facts import FACTS
from trt_uses import MODULE, Use, overrides_of, uses_of

import edgevlm.engines.tensorrt

FOLDER = Path(edgevlm.engines.tensorrt.__file__).parent
API = FOLDER / "api.py"
NEWER = {("LayerType", "ATTENTION_INPUT"), ("IAttentionInputLayer", "attention"), ("IAttention", "decomposable")}
VERSIONS = sorted(path.stem for path in FACTS.glob("*.json"))


def facts(version: str) -> dict[str, Any]:
    classes: dict[str, Any] = json.loads((FACTS / f"{version}.json").read_text())["classes"]
    return classes


def complaint(use: Use, classes: dict[str, Any]) -> str | None:
    """What is wrong with a use; None for nothing."""
    where = f"{use.kind}.{use.member}, line {use.line}"
    fact = classes.get(use.kind, {}).get(use.member)
    if fact is None:
        return f"{where}: there is no such thing"
    if use.how == "call":
        if isinstance(fact, str):
            return f"{where}: is a {fact} and is called"
        fits = any(sum(p[-1:] != "=" for p in parameters) <= use.arguments <= len(parameters) for parameters in fact)
        return None if fits else f"{where}: takes {fact} and gets {use.arguments}"
    if isinstance(fact, list):
        return f"{where}: is a method and is not called"
    return f"{where}: cannot be set" if use.how == "write" and fact != "write" else None


def uses() -> list[Use]:
    members = {member for classes in map(facts, VERSIONS) for members in classes.values() for member in members}
    ours = {"__init__", "dtype", "engine", "itemsize", "log", "name", "nbytes", "shape"}  # of objects that are not TensorRT's
    found, unknown = uses_of(API, members - ours)
    assert not unknown, "annotate these with their class"
    return found


def test_the_versions_of_both_profiles_are_known() -> None:
    assert {"10.3", "10.15", "10.16"} <= {".".join(version.split(".")[:2]) for version in VERSIONS}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_use_is_there(version: str) -> None:
    found = uses()
    assert len({(use.kind, use.member) for use in found}) > 40
    wrong = {(use.kind, use.member): said for use in found if (said := complaint(use, facts(version)))}
    assert wrong.keys() == (NEWER if version.startswith("10.3.") else set()), wrong


@pytest.mark.parametrize("version", VERSIONS)
def test_callbacks_are_those_that_tensorrt_calls(version: str) -> None:
    classes = facts(version)
    found = overrides_of(API)
    assert set(found) == {"ILogger"}
    for name, methods in found.items():
        expected = {
            member: len(fact[0]) for member, fact in classes[name].items() if member[0] != "_" and isinstance(fact, list)
        }
        assert {member: methods.get(member) for member in expected} == expected


def test_only_one_file_imports_tensorrt() -> None:
    folders = [FOLDER.parents[1] / name for name in ("apps", "bench", "calib", "edgevlm", "engines", "export", "runtime")]
    importing = re.compile(r"^\s*(import|from) tensorrt\b", re.MULTILINE)
    found = [path.name for folder in folders for path in folder.rglob("*.py") if importing.search(path.read_text())]
    assert found == ["api.py"]
    assert f"import tensorrt as {MODULE}\n" in API.read_text()
