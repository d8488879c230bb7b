"""What TensorRT's Python module offers, as facts in files: names, parameters, and whether a property can be set.

``python tests/engines/trt_facts.py WHEEL...`` writes ``tensorrt_api/VERSION.json`` from wheels of its bindings (``pip
download --no-deps tensorrt-cu12-bindings==10.3.0``). TensorRT itself is not needed: the libraries that the bindings load are
stood in for by ones whose functions do nothing, compiled here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

FACTS = Path(__file__).parent / "tensorrt_api"
CLASSES = (
    "Builder", "DataType", "ExecutionContextAllocationStrategy", "IAttention", "IAttentionInputLayer", "IBuilderConfig",
    "ICudaEngine", "IExecutionContext", "IHostMemory", "ILayer", "ILogger", "INetworkDefinition",
    "IOptimizationProfile", "ITensor", "LayerType", "MemoryPoolType",
    "NetworkDefinitionCreationFlag", "OnnxParser", "ParserError", "Runtime", "TensorIOMode",
)  # fmt: skip
FUNCTIONS = (
    "createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL", "initLibNvInferPlugins",
    "createNvOnnxParserRefitter_INTERNAL", "createNvOnnxParser_INTERNAL", "getBuilderPluginRegistry", "getPluginRegistry",
    "getNvOnnxParserVersion",
)  # fmt: skip
LIBRARIES = ("nvinfer", "nvonnxparser", "nvinfer_plugin")


def describe(module: Any) -> dict[str, Any]:
    """``{"version", "classes": {class: {member: fact}}}``.

    A fact is, for what is called, a list of overloads, each a list of parameters (``name=``: with a default); ``read``
    or ``write`` for a property; ``value`` for a member of an enumeration or a class inside.
    """
    classes = {name: getattr(module, name) for name in CLASSES if hasattr(module, name)}
    return {
        "version": module.__version__,
        "classes": {
            name: {member: _fact(kind, member) for member in sorted(dir(kind)) if member == "__init__" or member[0] != "_"}
            for name, kind in classes.items()
        },
    }


def _fact(kind: Any, member: str) -> Any:
    found = next(base.__dict__[member] for base in kind.__mro__ if member in base.__dict__)
    if isinstance(found, property):
        return "read" if found.fset is None else "write"
    return _overloads(member, found.__doc__ or "") if callable(found) and not isinstance(found, type) else "value"


def _overloads(name: str, text: str) -> list[list[str]]:
    """Parameters after ``self`` of each signature that a docstring of pybind11 begins its lines with."""
    found = []
    for line in re.findall(rf"^(?:\d+\. )?{name}\((.*)\) ->", text, re.MULTILINE):
        parts = [part.strip() for part in _split(line)]
        found.append(
            [re.sub(r":.*?(?:(=).*)?$", r"\1", part).replace(" ", "") for part in parts if not part.startswith("self")]
        )
    return [overload for overload in found if overload != ["*args", "**kwargs"]]


def _split(parameters: str) -> list[str]:
    """At the commas that stand in no bracket."""
    parts, depth = [""], 0
    for character in parameters:
        depth += (character in "[(<{") - (character in "])>}")
        if character == "," and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return [part for part in parts if part.strip()]


def unpack(wheel: Path, folder: Path) -> dict[str, str]:
    """The bindings in a folder, with libraries that do nothing; the environment to import them in."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    version = wheel.name.split("-")[1].split(".")[0]
    source = folder / "nothing.c"
    source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in FUNCTIONS))
    for library in LIBRARIES:
        name = f"lib{library}.so.{version}"
        command = ["cc", "-shared", "-fPIC", "-o", str(folder / name), str(source), f"-Wl,-soname,{name}"]
        subprocess.run(command, check=True)
    return os.environ | {"LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(folder)}


def facts_of(wheel: Path) -> dict[str, Any]:
    """What a wheel's module offers."""
    with tempfile.TemporaryDirectory() as folder:
        environment = unpack(wheel, Path(folder))
        code = f"import json, runpy, tensorrt_bindings as t; print(json.dumps(runpy.run_path({__file__!r})['describe'](t)))"
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


def as_text(facts: dict[str, Any]) -> str:
    """One line a member."""
    classes = []
    for name, members in facts["classes"].items():
        lines = ",\n".join(f"   {json.dumps(member)}: {json.dumps(fact)}" for member, fact in members.items())
        classes.append(f"  {json.dumps(name)}: {{\n{lines}\n  }}")
    return f'{{\n "version": {json.dumps(facts["version"])},\n "classes": {{\n' + ",\n".join(classes) + "\n }\n}\n"


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        read = facts_of(path)
        (FACTS / f"{read['version']}.json").write_text(as_text(read))
