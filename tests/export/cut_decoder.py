"""The decoder cut at the KV boundary into L + 1 graphs by the same builder, with attention in numpy between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto

from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.decoder import _Decoder, _stored
from edgevlm.export.graph import GraphBuilder, WeightsFile
from edgevlm.export.precisions import Precision, Stored
from edgevlm.export.profiles import load_profile
from edgevlm.export.writer import _decoder_shape

Float32 = NDArray[np.float32]


class CutDecoder:
    """Graph 0 makes the first layer's query, key and value; graph ``l`` finishes layer ``l - 1`` and projects layer ``l``."""

    def __init__(self, checkpoint: Path, folder: Path, precision: Precision, **session: Any) -> None:
        folder.mkdir(exist_ok=True)
        source = Checkpoint(checkpoint)
        backbone, self.shape = _decoder_shape(source)
        s = self.shape
        embedding = source.tensor("text.embed_tokens.weight", (s.vocab, s.hidden))
        table = embedding if s.tied else source.tensor("text.lm_head.weight", (s.vocab, s.hidden))
        head, done = Stored.of(precision.table, table), None
        with (folder / "weights").open("wb") as stream:
            weights = WeightsFile(stream, "weights")
            for layer in range(s.layers + 1):
                d = _Decoder(GraphBuilder(f"cut{layer}", weights), s, load_profile("onnxruntime"))
                g = d.graph
                d.residual = g.input("residual", TensorProto.FLOAT, [1, "S", s.hidden])
                if done is not None:
                    attention = g.input("attention", TensorProto.FLOAT, [1, "S", s.heads * s.head_dim])
                    d.residual, d.delta = d.finish(layer - 1, done, attention, d.residual)
                if layer == s.layers:
                    d.logits(source.tensor("text.norm.weight", (s.hidden,)), head)
                else:
                    done = _stored(backbone.layer(source, s, layer), precision.matrices)
                    d.operators.tables()
                    _, key, value, d.residual = d.project(layer, done, d.residual, d.delta)
                    for name in (key, value, *([d.residual] if layer else [])):
                        g.output(name, TensorProto.FLOAT, None)
                g.save(folder / f"{layer}.onnx")
        self.sessions = [opened(folder / f"{layer}.onnx", **session) for layer in range(s.layers + 1)]

    def logits(self, embeds: Float32, cos: Float32, sin: Float32) -> Float32:
        """``[S, vocab]`` of rows ``[S, hidden]`` before which there is nothing."""
        given: dict[str, Any] = {"residual": embeds[None]}
        for session in self.sessions[:-1]:
            names = [node.name for node in session.get_outputs()]
            query, key, value, *rest = session.run(names, given | {"cos": cos[None], "sin": sin[None]})
            given = {"residual": rest[0] if rest else given["residual"], "attention": self._attention(query, key, value)}
        found: Float32 = self.sessions[-1].run(["logits"], given)[0][0]
        return found

    def _attention(self, query: Float32, key: Float32, value: Float32) -> Float32:
        s, rows = self.shape, query.shape[1]
        by_head = [x[0].reshape(rows, -1, s.head_dim).astype(np.float64) for x in (query, key, value)]
        later = np.triu(np.ones((rows, rows), bool), 1)
        out = np.zeros((rows, s.heads, s.head_dim))
        for head in range(s.heads):
            kv = head // (s.heads // s.kv_heads)
            scores = by_head[0][:, head] @ by_head[1][:, kv].T / np.sqrt(s.head_dim)
            weights = np.exp(np.where(later, -np.inf, scores) - np.where(later, -np.inf, scores).max(1, keepdims=True))
            out[:, head] = weights / weights.sum(1, keepdims=True) @ by_head[2][:, kv]
        return out.reshape(1, rows, -1).astype(np.float32)


def opened(path: Path, *, prepack: bool = True, threads: int = 1, optimised: bool = True) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_prepacking", "0" if prepack else "1")
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimised else levels.ORT_DISABLE_ALL
    return ort.InferenceSession(str(path), options, ["CPUExecutionProvider"])
