"""The decoder graph, built by hand from weights.

Traced decoders concatenate their cache; this one appends in place to memory it does not own. Profile onnxruntime:

    inputs   inputs_embeds [1, S, E (1 + K)]   cos, sin [1, S, D/2]   total_len int32 [L]   logit_rows int64 [R]
             key{l}, value{l} [1, Hkv, C_l, D], and with int8 key_scale{l}, value_scale{l} [1, Hkv, 1, D]
    outputs  logits [1, R, V]   key{l}_out, value{l}_out: to be bound to the addresses of key{l}, value{l}
             query{l} [1, S, Hq D], rotated: probes, which cost nothing unless fetched

K is 0, but for DeepStack: then columns ``(1 + l) E ..`` of a row are added to it after layer ``l``, zeros for text.
``total_len[l]`` counts the rows valid in layer ``l`` after the call. A layer is three functions: ``project`` (residual
to q, k, v), ``attend`` (the only one that knows the cache) and ``finish`` (to residual again), so that a graph can be
cut between them.

What differs by profile, norms, rotary positions and ``attend``, is in :mod:`edgevlm.export.profiles`; docs/engines.md has the
inputs and outputs of those for TensorRT.

Three graphs of one builder and one weights file: ``whole``; ``st-spattn`` for the prefill of frames, in which the layers
from one on attend by the pattern of :mod:`edgevlm.export.st_spattn` and which has its two inputs more; and ``projections``,
which takes ``inputs_embeds``, ``cos`` and ``sin`` through ``project`` of every layer and nothing else. A bundle of another KV
precision has ``whole`` in fp32 besides, as ``fp32-kv``: what scales are measured with, and errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto

from edgevlm.engines.base import KVType
from edgevlm.engines.profiles import ONNXRUNTIME
from edgevlm.errors import UserError
from edgevlm.export.backbones import Backbone, DecoderShape, LayerWeights
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.graph import GraphBuilder, WeightsFile
from edgevlm.export.journal import Journal
from edgevlm.export.kv import Memory
from edgevlm.export.precisions import DEFAULT_PRECISION, Float32, Layout, Stored
from edgevlm.export.precisions.table import Table, head_table, write_table
from edgevlm.export.profiles import Cache, Operators, Profile, load_profile
from edgevlm.export.scaling import Samples, in_blocks, scaled
from edgevlm.export.st_spattn import SparseAttention
from edgevlm.runtime.bundle import Progress

GRAPHS = {  # variant -> file
    "whole": "decoder.onnx",
    "st-spattn": "decoder-st-spattn.onnx",
    "projections": "decoder-projections.onnx",
    "fp32-kv": "decoder-fp32-kv.onnx",
}
WEIGHTS = "decoder.weights"
MATRICES = ("qkv", "output", "gate_up", "down")  # of a layer
ST_SPATTN_FROM = 3  # the first sparse layer: the one above PureKV's CLIE layer, whose scores need dense attention


@dataclass(slots=True)
class _Decoder:
    """One decoder graph under construction: ``start``, each layer in turn, ``logits``.

    ``residual`` and ``delta`` add up to the stream's hidden state. Layers from ``sparse_from`` on attend sparsely.
    """

    graph: GraphBuilder
    shape: DecoderShape
    profile: Profile
    sparse_from: int | None = None
    kv: KVType = "fp32"
    residual: str = ""
    delta: str | None = None
    features: list[str] = field(default_factory=list)
    operators: Operators = field(init=False)
    cache: Cache = field(init=False)
    sparse: SparseAttention | None = None

    def __post_init__(self) -> None:
        self.operators = self.profile.operators(self.graph, self.shape)
        self.cache = self.profile.cache(self.graph, self.shape, self.kv)
        if self.sparse_from is not None:
            self.sparse = SparseAttention(self.graph, self.shape, Memory(self.graph, self.shape, self.kv))

    def start(self) -> None:
        """The inputs that are not a layer's, and what is made of them once."""
        g, parts = self.graph, 1 + self.shape.deepstack
        self.residual = g.input("inputs_embeds", TensorProto.FLOAT, [1, "S", self.shape.hidden * parts])
        if self.shape.deepstack:
            widths = {str(part): self.shape.hidden for part in range(parts)}
            self.residual, *self.features = self.split("inputs", self.residual, widths)
        self.operators.tables()
        self.cache.start()
        g.input("logit_rows", TensorProto.INT64, ["R"])
        if self.sparse is not None:
            self.sparse.inputs()

    def layer(self, layer: int, w: LayerWeights[Stored]) -> None:
        """One layer of the stream; of the last, past its cache rows, only the rows asked for."""
        query, key, value, self.residual = self.project(layer, w, self.residual, self.delta)
        sparse = self.sparse if self.sparse_from is not None and layer >= self.sparse_from else None
        attention = (sparse or self.cache).attend(layer, query, key, value)
        if layer == self.shape.layers - 1:
            attention = self.graph.node("Gather", [attention, "logit_rows"], ["last.attention"], axis=1)
            self.residual = self.graph.node("Gather", [self.residual, "logit_rows"], ["last.residual"], axis=1)
        self.residual, self.delta = self.finish(layer, w, attention, self.residual)
        if layer < self.shape.deepstack:
            self.add_features(layer)

    def add_features(self, layer: int) -> None:
        """DeepStack (arXiv 2406.04334): what the tower gave for this layer joins the hidden state after it."""
        features = self.features[layer]
        if layer == self.shape.layers - 1:
            features = self.graph.node("Gather", [features, "logit_rows"], ["last.features"], axis=1)
        self.delta = self.graph.node("Add", [str(self.delta), features], [f"layer{layer}.with_features"])

    def linear(self, name: str, rows: str, weight: Stored, bias: Float32 | None = None) -> str:
        """``rows @ weight.T + bias`` for a ``[out, in]`` weight that is stored already."""
        g, product = self.graph, weight.multiply(self.graph, name, rows)
        return product if bias is None else g.node("Add", [product, g.weight(f"{name}.bias", bias)], [f"{name}.biased"])

    def split(self, name: str, rows: str, sizes: dict[str, int]) -> list[str]:
        """Split the last axis into named parts."""
        g, outputs = self.graph, [f"{name}.{part}" for part in sizes]
        lengths = g.constant(f"{name}.sizes", np.array(list(sizes.values()), np.int64))
        g.node("Split", [rows, lengths], outputs, axis=-1)
        return outputs

    def head_norm(self, name: str, rows: str, gamma: np.ndarray | None) -> str:
        """RMS norm of each head of ``[1, S, heads D]`` by itself; as it is without a gamma."""
        if gamma is None:
            return rows
        g, dim = self.graph, self.shape.head_dim
        heads = g.node("Reshape", [rows, g.constant("heads.shape", np.array([1, 0, -1, dim], np.int64))], [f"{name}.heads"])
        normed, _ = self.operators.norm(name, gamma, heads, None)
        return g.node("Reshape", [normed, g.constant("joined.shape", np.array([1, 0, -1], np.int64))], [f"{name}.joined"])

    def project(self, layer: int, w: LayerWeights[Stored], residual: str, delta: str | None) -> tuple[str, str, str, str]:
        """Norm, one matrix for q, k and v, rotary: returns query, key, value ``[1, S, heads D]`` and the residual."""
        s, name = self.shape, f"layer{layer}"
        normed, residual = self.operators.norm(f"{name}.input_norm", w.input_norm, residual, delta)
        packed = self.linear(f"{name}.qkv", normed, w.qkv, w.qkv_bias)
        q, k, v = self.split(f"{name}.qkv", packed, {"q": s.heads * s.head_dim, "k": s.kv_size, "v": s.kv_size})
        q, k = self.head_norm(f"{name}.q_norm", q, w.query_norm), self.head_norm(f"{name}.k_norm", k, w.key_norm)
        query = self.operators.rotate(f"query{layer}", q, s.heads)
        self.graph.output(query, TensorProto.FLOAT, [1, "S", s.heads * s.head_dim])
        return query, self.operators.rotate(f"{name}.key", k, s.kv_heads), v, residual

    def finish(self, layer: int, w: LayerWeights[Stored], attention: str, residual: str) -> tuple[str, str]:
        """Output projection, norm and SwiGLU: returns the new residual and the delta still to be added to it."""
        g, name, ffn = self.graph, f"layer{layer}", self.shape.intermediate
        projected = self.linear(f"{name}.output", attention, w.output, w.output_bias)
        normed, residual = self.operators.norm(f"{name}.mlp_norm", w.mlp_norm, residual, projected)
        packed = self.linear(f"{name}.mlp", normed, w.gate_up, w.gate_up_bias)
        gate, up = self.split(f"{name}.mlp", packed, {"gate": ffn, "up": ffn})
        sigmoid = g.node("Sigmoid", [gate], [f"{name}.sigmoid"])
        gated = g.node("Mul", [g.node("Mul", [gate, sigmoid], [f"{name}.silu"]), up], [f"{name}.gated"])
        return residual, self.linear(f"{name}.down", gated, w.down, w.down_bias)

    def logits(self, final_norm: np.ndarray, head: Table) -> None:
        """Final norm and vocabulary scores ``[1, R, V]`` of the rows that are left."""
        s, g = self.shape, self.graph
        normed, _ = self.operators.norm("final_norm", final_norm, self.residual, self.delta)
        rows = g.node("Reshape", [normed, g.constant("rows.shape", np.array([-1, s.hidden], np.int64))], ["rows"])
        scores = head.multiply(g, "head", rows)
        shape = g.constant("logits.shape", np.array([1, -1, s.vocab], np.int64))
        g.output(g.node("Reshape", [scores, shape], ["logits"]), TensorProto.FLOAT, [1, "R", s.vocab])


@dataclass(slots=True)
class _Projections(_Decoder):
    """What every layer would make of the call's raw embeddings: ``query{l}``, and ``key{l}`` ``[1, S, Hkv D]``, rotated."""

    def start(self) -> None:
        self.graph.input("inputs_embeds", TensorProto.FLOAT, [1, "S", self.shape.hidden])
        self.operators.tables()

    def layer(self, layer: int, w: LayerWeights[Stored]) -> None:
        _, key, _, _ = self.project(layer, w, "inputs_embeds", None)
        self.graph.node("Identity", [key], [f"key{layer}"])
        self.graph.output(f"key{layer}", TensorProto.FLOAT, [1, "S", self.shape.kv_size])

    def logits(self, final_norm: np.ndarray, head: Table) -> None:
        """It has none."""


@dataclass(frozen=True, slots=True)
class DecoderFiles:
    """graphs: variant -> file. embedding: its file, and that of its scales if it has."""

    graphs: dict[str, str]
    embedding: tuple[str, ...]


def write_decoder(
    checkpoint: Checkpoint,
    backbone: Backbone,
    shape: DecoderShape,
    folder: Path,
    progress: Progress,
    st_spattn_from: int | None = None,
    sparse: bool = True,
    precision: str = DEFAULT_PRECISION,
    samples: Samples | None = None,
    journal: Journal | None = None,
    kv: KVType = "fp32",
    profile: str = ONNXRUNTIME,
) -> DecoderFiles:
    """Write the graphs of the profile, those of GRAPHS, ``decoder.weights`` and the embedding into ``folder``.

    Without ``sparse`` there is no ``st-spattn`` graph: frames of some families have text between them. ``st_spattn_from``: see
    :func:`first_sparse_layer`. ``kv``: what they keep keys and values as; unless fp32 there is ``fp32-kv`` too. A tied head is
    the embedding's files themselves: the graphs refer to their bytes. ``precision``: of matrices, embedding and head; see
    :mod:`edgevlm.export.precisions`. With ``samples`` matrices are scaled for activations like those; see
    :mod:`edgevlm.export.scaling`. What ``journal`` has is not written again. Raises UserError for a checkpoint whose tensors
    are missing or of another shape and for a precision that is not known, OSError if the disk does not take them.
    """
    written_for = load_profile(profile)
    chosen, journal, size = written_for.precision(precision), journal or Journal(), (shape.vocab, shape.hidden)
    sparse_from = first_sparse_layer(shape, st_spattn_from)
    progress("embedding")
    table = write_table(folder, chosen.table, size, lambda: checkpoint.rows("text.embed_tokens.weight", size), journal)
    with (folder / WEIGHTS).open("r+b" if journal.values(WEIGHTS) else "w+b") as stream:
        weights = WeightsFile(stream, WEIGHTS, journal)
        variants = _variants(written_for, weights, shape, precision, sparse_from if sparse else None, kv)
        for d in variants.values():
            d.start()
        for layer in range(shape.layers):
            step = f"decoder layer {layer + 1} of {shape.layers}"
            progress(step)
            done = journal.has(step)
            read = backbone.layer(checkpoint.without_reading() if done else checkpoint, shape, layer)
            if samples is not None and not done:
                read = scaled(read, layer, samples, in_blocks(precision, profile))
            w = _stored(read, chosen.matrices, Stored.written if done else Stored.of)
            for d in variants.values():
                d.layer(layer, w)
            weights.finish(step)
            del read, w  # before the next layer is read
        progress("head")
        head = table
        if not shape.tied:
            head = head_table(weights, chosen.table, size, lambda: checkpoint.rows("text.lm_head.weight", size))
        final_norm = checkpoint.tensor("text.norm.weight", (shape.hidden,))
        for d in variants.values():
            d.logits(final_norm, head)
        weights.finish("head")
        for variant, d in variants.items():
            d.graph.save(folder / GRAPHS[variant])
    return DecoderFiles({variant: GRAPHS[variant] for variant in variants}, table.files)


def _variants(
    profile: Profile, weights: WeightsFile, shape: DecoderShape, precision: str, sparse_from: int | None, kv: KVType
) -> dict[str, _Decoder]:
    """The graphs to be written, by variant."""

    def graph(variant: str) -> GraphBuilder:
        return profile.graph(Path(GRAPHS[variant]).stem, weights, precision)

    made: dict[str, _Decoder] = {"whole": _Decoder(graph("whole"), shape, profile, kv=kv)}
    if sparse_from is not None and "st-spattn" in profile.variants:
        made["st-spattn"] = _Decoder(graph("st-spattn"), shape, profile, sparse_from, kv)
    made["projections"] = _Projections(graph("projections"), shape, profile)
    if kv != "fp32" and "fp32-kv" in profile.variants:
        made["fp32-kv"] = _Decoder(graph("fp32-kv"), shape, profile)
    return made


def _stored(
    w: LayerWeights[Float32 | Stored], layout: Layout, make: Callable[[Layout, Float32], Stored] = Stored.of
) -> LayerWeights[Stored]:
    """The layer with its matrices rounded, once for all graphs, unless the checkpoint has them so."""

    def stored(matrix: Float32 | Stored) -> Stored:
        return matrix if isinstance(matrix, Stored) else make(layout, matrix)

    matrices: Any = {name: stored(getattr(w, name)) for name in MATRICES}
    rounded: Any = replace(w, **matrices)
    layer: LayerWeights[Stored] = rounded
    return layer


def first_sparse_layer(shape: DecoderShape, wanted: int | None) -> int:
    """The layer from which the ``st-spattn`` graph is sparse: the one wanted, else ST_SPATTN_FROM or a small model's last.

    Raises UserError for a layer that the model does not have.
    """
    if wanted is None:
        return min(ST_SPATTN_FROM, shape.layers - 1)
    if not 0 <= wanted < shape.layers:
        raise UserError(f"ST-SpAttn cannot start at layer {wanted}: the model has layers 0 to {shape.layers - 1}")
    return wanted
