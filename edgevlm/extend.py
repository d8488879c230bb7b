"""The interface for your own policies, sources, sinks, model families, engines and precisions.

The interface is stable, and the changelog lists its changes. docs/guide/extend.md explains each kind of extension, and
``edgevlm check`` tests an extension.
"""

from typing import TYPE_CHECKING, Any

from edgevlm.packages import lazy_names

if TYPE_CHECKING:
    from edgevlm.apps.sources import Frame, Source, SourceOptions
    from edgevlm.apps.watches.events import WatchEvent
    from edgevlm.apps.watches.sinks import Sink
    from edgevlm.engines.onnxruntime_cpu import OnnxRuntimeCpu
    from edgevlm.export.backbones import Backbone, DecoderShape, LayerWeights
    from edgevlm.export.checkpoint import Checkpoint
    from edgevlm.export.families import Family, FamilyParts
    from edgevlm.export.precisions import Layout, Layouts, Precision
    from edgevlm.export.precisions.layouts import Blocks
    from edgevlm.export.vision import Tower
    from edgevlm.export.vision.layers import VisionGraph
    from edgevlm.export.vision.square import EncoderTower
    from edgevlm.runtime.engine import Decoder, Engine, KVBuffer, StepResult, arrays_of
    from edgevlm.runtime.policies import Appended, Layer, Needs, Policy, StreamShape, setting
    from edgevlm.runtime.policies.attention import QueryWindow

_HOMES = {
    "Appended": "runtime.policies", "Backbone": "export.backbones", "Blocks": "export.precisions.layouts",
    "Checkpoint": "export.checkpoint", "Decoder": "runtime.engine", "DecoderShape": "export.backbones",
    "EncoderTower": "export.vision.square", "Engine": "runtime.engine", "Family": "export.families",
    "FamilyParts": "export.families", "Frame": "apps.sources", "KVBuffer": "runtime.engine", "Layer": "runtime.policies",
    "LayerWeights": "export.backbones", "Layout": "export.precisions", "Layouts": "export.precisions",
    "Needs": "runtime.policies",
    "OnnxRuntimeCpu": "engines.onnxruntime_cpu", "Policy": "runtime.policies", "Precision": "export.precisions",
    "QueryWindow": "runtime.policies.attention", "Sink": "apps.watches.sinks", "Source": "apps.sources",
    "SourceOptions": "apps.sources", "StepResult": "runtime.engine", "StreamShape": "runtime.policies",
    "Tower": "export.vision", "VisionGraph": "export.vision.layers", "WatchEvent": "apps.watches.events",
    "arrays_of": "runtime.engine", "setting": "runtime.policies",
}  # fmt: skip
__all__ = [
    "Appended", "Backbone", "Blocks", "Checkpoint", "Decoder", "DecoderShape", "EncoderTower", "Engine", "Family",
    "FamilyParts", "Frame", "KVBuffer", "Layer", "LayerWeights", "Layout", "Layouts", "Needs", "OnnxRuntimeCpu", "Policy",
    "Precision", "QueryWindow", "Sink", "Source", "SourceOptions", "StepResult", "StreamShape", "Tower", "VisionGraph",
    "WatchEvent", "arrays_of", "setting",
]  # fmt: skip


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    return lazy_names(__name__, _HOMES)(name)
