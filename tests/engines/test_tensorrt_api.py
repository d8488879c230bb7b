"""Every class, member and argument count of TensorRT that our code uses is there in each version that it is written for."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trt_facts import FACTS, as_text, describe, facts_of, unpack
from trt_uses import MODULE, Use, overrides_of, uses_of

import edgevlm.engines.tensorrt

FOLDER = Path(edgevlm.engines.tensorrt.__file__).parent
API = FOLDER / "api.py"
NEWER = {("LayerType", "ATTENTION_INPUT"), ("IAttentionInputLayer", "attention"), ("IAttention", "decomposable")}
VERSIONS = sorted(path.stem for path in FACTS.glob("*.json"))
WHEELS = os.environ.get("EDGEVLM_TENSORRT_WHEELS")  # a folder of them


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
    found, unknown = uses_of(API, members - {"name", "dtype"})
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


def test_the_check_finds_what_is_wrong(tmp_path: Path) -> None:
    wrong = tmp_path / "api.py"
    wrong.write_text(
        "def f(a: trt.IBuilderConfig, e: trt.ParserError, x):\n"
        "    a.set_timing_cache(1)\n    a.no_such_thing(1)\n    e.desc\n    a.progress_monitor()\n"
        "    trt.DataType.FLOAT64\n    e.node = 3\n    trt.OnnxParser(a)\n    x.parse_from_file()\n"
        "    a.num_optimization_profiles = 1\n"
    )
    classes = facts("10.3.0")
    found, unknown = uses_of(wrong, {"parse_from_file"})
    assert {re.sub(r".*line (\d+):.*", r"\1", said) for use in found if (said := complaint(use, classes))} == set("2345678") | {
        "10"
    }
    assert unknown == ["line 9: x.parse_from_file"]


def test_only_one_file_imports_tensorrt() -> None:
    folders = [FOLDER.parents[1] / name for name in ("apps", "bench", "calib", "edgevlm", "engines", "export", "runtime")]
    importing = re.compile(r"^\s*(import|from) tensorrt\b", re.MULTILINE)
    found = [path.name for folder in folders for path in folder.rglob("*.py") if importing.search(path.read_text())]
    assert found == ["api.py"]
    assert f"import tensorrt as {MODULE}\n" in API.read_text()


@pytest.mark.parametrize("version", VERSIONS)
def test_the_fake_offers_nothing_that_tensorrt_does_not(version: str) -> None:
    import fake_tensorrt

    classes = facts(version)
    for name in set(classes) - {"IHostMemory"}:
        for member in vars(getattr(fake_tensorrt, name)):
            if member[0] != "_" and (name, member) not in NEWER:
                assert member in classes[name], f"{name}.{member}"
        methods = inspect.getmembers(getattr(fake_tensorrt, name), inspect.isfunction)
        for member, method in methods:
            if member[0] != "_":
                names = [p for p in inspect.signature(method).parameters if p != "self"]
                assert any(names == [p.rstrip("=") for p in overload][: len(names)] for overload in classes[name][member]), (
                    member
                )


def test_the_facts_are_those_of_the_installed_bindings() -> None:
    """Of the wheels in EDGEVLM_TENSORRT_WHEELS, or of an installed TensorRT of a version that there are facts of."""
    if WHEELS:
        wheels = sorted(Path(WHEELS).glob("tensorrt_cu*_bindings-*.whl"))
        assert wheels
        for wheel in wheels:
            read = facts_of(wheel)
            assert (FACTS / f"{read['version']}.json").read_text() == as_text(read)
        return
    trt = pytest.importorskip(
        "tensorrt", reason="no TensorRT here, and EDGEVLM_TENSORRT_WHEELS names no folder of its bindings"
    )
    if trt.__version__ not in VERSIONS:
        assert [said for use in uses() if (said := complaint(use, describe(trt)["classes"]))] == []
        return
    assert (FACTS / f"{trt.__version__}.json").read_text() == as_text(describe(trt))


@pytest.mark.skipif(not WHEELS, reason="EDGEVLM_TENSORRT_WHEELS names no folder of TensorRT's bindings")
def test_our_classes_derive_from_the_real_ones(tmp_path: Path) -> None:
    """With the real bindings over libraries that do nothing: the logger, and the line where TensorRT does not start."""
    program = (
        "import sys, tensorrt_bindings; sys.modules['tensorrt'] = tensorrt_bindings\n"
        "from edgevlm.engines.tensorrt import api\n"
        "from edgevlm.errors import UserError\n"
        "log = api.Log()\n"
        "log.log(api.trt.ILogger.ERROR, 'a\\n b'); log.log(api.trt.ILogger.WARNING, 'c')\n"
        "print(log.take())\n"
        "from edgevlm.engines.tensorrt.jobs import BuildJob\n"
        "try: api.build(BuildJob('', b'', '', {}, frozenset(), 0, ''), 1, log)\n"
        "except UserError as error: print(error)\n"
    )
    for wheel in sorted(Path(str(WHEELS)).glob("tensorrt_cu*_bindings-*.whl")):
        folder = tmp_path / wheel.stem
        environment = unpack(wheel, folder)
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said = done.stdout.splitlines()
        assert said[0] == "a b"
        assert "does not start here" in said[1]
        assert wheel.name.split("-")[1] in said[1]
