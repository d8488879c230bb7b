"""What TensorRT's Python module offers, as facts in files: names, parameters, and whether a property can be set.

``python tests/engines/trt_facts.py`` writes ``tensorrt_api/VERSION.json`` of the bindings that are installed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FACTS = Path(__file__).parent / "tensorrt_api"
CLASSES = (
    "Builder", "DataType", "ExecutionContextAllocationStrategy", "IAttention", "IAttentionInputLayer", "IBuilderConfig",
    "ICudaEngine", "IExecutionContext", "IHostMemory", "ILayer", "ILogger", "INetworkDefinition",
    "IOptimizationProfile", "ITensor", "LayerType", "MemoryPoolType",
    "NetworkDefinitionCreationFlag", "OnnxParser", "ParserError", "Runtime", "TensorIOMode",
)  # fmt: skip


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


def as_text(facts: dict[str, Any]) -> str:
    """One line a member."""
    classes = []
    for name, members in facts["classes"].items():
        lines = ",\n".join(f"   {json.dumps(member)}: {json.dumps(fact)}" for member, fact in members.items())
        classes.append(f"  {json.dumps(name)}: {{\n{lines}\n  }}")
    return f'{{\n "version": {json.dumps(facts["version"])},\n "classes": {{\n' + ",\n".join(classes) + "\n }\n}\n"


if __name__ == "__main__":
    import tensorrt

    (FACTS / f"{tensorrt.__version__}.json").write_text(as_text(describe(tensorrt)))
