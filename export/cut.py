"""The decoder cut at its KV boundary: L + 1 graphs over the one weights file, driven layer by layer.

``cut0`` makes layer 0's query, key and value of the rows; ``cut{l}`` appends those of layer ``l - 1`` and attends, finishes
that layer and projects the next one, or, for l = L, gives the logits:

    cut0       inputs_embeds [1, S, E]   cos, sin [1, S, D/2]
    cut{l}     what cut{l-1} gave, by its names: query [1, S, Hq D], key and value [1, S, Hkv D], residual [1, S, E]
               (cut1's residual is inputs_embeds);   with DeepStack features{l-1} [1, S, E] after the layers that have them
               total_len{l-1}_{h}, last_row{l-1}_{h} (one less) int32 [1]   cos, sin, but for l = L: logit_rows int64 [R]
               key{l-1}_{h}, value{l-1}_{h} [1, 1, C, D], and with int8 key_scale{l-1}_{h}, value_scale{l-1}_{h} [1, 1, 1, D]
    outputs    query, key, value and the residual of layer l, in this order; of cutL logits [1, R, V]
               key{l-1}_{h}_out, value{l-1}_{h}_out: to be bound to the addresses of what they append to

Each KV head has an attention node and a length of its own, so that between two calls a caller may put other rows before the
new ones. ``total_len`` counts the rows valid in each head of that layer after the call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from onnx import TensorProto

from edgevlm.export.backbones import DecoderShape, LayerWeights
from edgevlm.export.graph import GraphBuilder
from edgevlm.export.kv import HeadMemory
from edgevlm.export.layers import DecoderGraph
from edgevlm.export.precisions import Stored
from edgevlm.export.precisions.table import Table
from edgevlm.export.profiles import Profile
from edgevlm.runtime.engine import KVType


@dataclass(slots=True)
class CutDecoder:
    """All graphs of a cut decoder, under construction beside the others; ``graph`` makes an empty one of a name."""

    graph: Callable[[str], GraphBuilder]
    shape: DecoderShape
    profile: Profile
    kv: KVType
    parts: list[DecoderGraph] = field(default_factory=list)

    def start(self) -> None:
        """The first graph's rows."""
        part = self._opened()
        part.operators.tables()
        part.residual = part.graph.input("inputs_embeds", TensorProto.FLOAT, [1, "S", self.shape.hidden])

    def layer(self, layer: int, w: LayerWeights[Stored]) -> None:
        """End one graph with this layer's projections, and begin the next with its attention."""
        s, before = self.shape, self.parts[-1]
        _, key, value, residual = before.project(layer, w, before.residual, before.delta)
        given = {f"query{layer}": s.heads * s.head_dim, key: s.kv_size, value: s.kv_size, residual: s.hidden}
        for name, width in list(given.items())[1:]:
            if name != "inputs_embeds":
                before.graph.output(name, TensorProto.FLOAT, [1, "S", width])
        part = self._opened()
        for name, width in given.items():
            part.graph.input(name, TensorProto.FLOAT, [1, "S", width])
        if layer < s.deepstack:
            part.graph.input(f"features{layer}", TensorProto.FLOAT, [1, "S", s.hidden])
        if layer == s.layers - 1:
            part.graph.input("logit_rows", TensorProto.INT64, ["R"])
        else:
            part.operators.tables()
        part.residual = residual
        part.after(layer, w, HeadMemory(part.graph, s, self.kv).attend(layer, f"query{layer}", key, value))

    def logits(self, final_norm: np.ndarray, head: Table) -> None:
        """The last graph's end."""
        self.parts[-1].logits(final_norm, head)

    def graphs(self) -> dict[str, GraphBuilder]:
        """``cut{l}`` -> graph, once all is made."""
        return {f"cut{index}": part.graph for index, part in enumerate(self.parts)}

    def _opened(self) -> DecoderGraph:
        """A new graph, the next of them."""
        part = DecoderGraph(self.graph(f"decoder-cut-{len(self.parts)}"), self.shape, self.profile, kv=self.kv)
        part.features = [f"features{layer}" for layer in range(self.shape.deepstack)]
        self.parts.append(part)
        return part
