"""Build the decoder's graphs from its weights, node by node.

A decoder traced from PyTorch would concatenate new rows to its cache; edgevlm's graphs append to the caller's memory. In
profile ``onnxruntime``:

    inputs   inputs_embeds [1, S, E (1 + K)]   cos, sin [1, S, D/2]   total_len int32 [L]   logit_rows int64 [R]
             key{l}, value{l} [1, Hkv, C_l, D], and with int8 key_scale{l}, value_scale{l} [1, Hkv, 1, D]
    outputs  logits [1, R, V]   key{l}_out, value{l}_out: to be bound to the addresses of key{l}, value{l}
             query{l} [1, S, Hq D], rotated: probes, which cost nothing unless fetched

The first K layers get DeepStack features: columns ``(1 + l) E`` to ``(2 + l) E`` of the input rows are added to the output of
layer ``l``. Rows of text have zeros in these columns. ``total_len[l]`` is the number of valid rows in layer ``l`` after the
call. A layer has three parts: ``project`` computes q, k and v, ``attend`` uses the cache, and ``finish`` updates the residual.
A graph can end after any part. docs/internals/engines.md lists TensorRT's inputs and outputs.

All graphs share one weights file. The graph ``full`` is the whole decoder. ``st-spattn`` prefills frames with sparse attention
in later layers (:mod:`edgevlm.export.st_spattn`). ``per-layer0`` to ``per-layer{L}`` are ``full`` cut at each layer's
attention, which the caller computes (:class:`PerLayerGraphs`). The CPU engine runs the per-layer graphs; CUDA runs ``full`` and
``st-spattn``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from onnx import TensorProto

from edgevlm.errors import UserError
from edgevlm.export.backbones import Backbone, DecoderShape, LayerWeights
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.graph import ExportJournal, GraphBuilder, WeightsFile
from edgevlm.export.kv import Memory
from edgevlm.export.options import ExportOptions, Samples
from edgevlm.export.precisions import DEFAULT_PRECISION, Float32, Layout, Stored
from edgevlm.export.precisions.table import WeightTable, head_table, write_table
from edgevlm.export.profiles import Profile, load_profile
from edgevlm.export.rotation import DecoderRotations
from edgevlm.export.st_spattn import SparseAttention
from edgevlm.progress import Notify
from edgevlm.runtime.kv import KVType

WEIGHTS = "decoder.weights"
GELU = 2 * (2 / np.pi) ** 0.5
ST_SPATTN_FROM = 3  # the layer after PureKV's CLIE layer; the CLIE layer's scores need dense attention


@dataclass(frozen=True, slots=True)
class DecoderFiles:
    """A decoder's file names.

    ``graphs`` is keyed by variant. ``embedding`` lists one file, or two if the embedding has scales.
    """

    graphs: dict[str, str]
    embedding: tuple[str, ...]


def write_decoder(
    checkpoint: Checkpoint,
    backbone: Backbone,
    shape: DecoderShape,
    folder: Path,
    options: ExportOptions,
    *,
    progress: Notify = lambda _: None,
    sparse: bool = True,
    samples: Samples | None = None,
    journal: ExportJournal | None = None,
) -> DecoderFiles:
    """Write the profile's graphs, ``decoder.weights`` and the embedding into ``folder``.

    Raises UserError for an unknown precision or a missing or misshapen tensor, and OSError if a file cannot be written.
    ``sparse``: whether to write the ``st-spattn`` graph too, which is of no use if text comes between frames. ``samples``:
    inputs of the matrices, for rounding by GPTQ (:mod:`edgevlm.export.precisions.rounding`). ``journal``: the finished steps of
    an interrupted export, which are skipped.
    """
    profile, precision = load_profile(options.profile), options.precision or DEFAULT_PRECISION
    chosen, journal, size = profile.precision(precision), journal or ExportJournal(), (shape.vocab, shape.hidden)
    rotations = DecoderRotations.of(shape) if chosen.rotated and "attended" not in backbone.vectors(shape, 0) else None
    progress("embedding")
    table = write_table(folder, chosen.table, size, lambda: backbone.embedding(checkpoint, shape), journal)
    with (folder / WEIGHTS).open("a+b") as stream:
        weights = WeightsFile(stream, WEIGHTS, journal)

        def graph(name: str) -> GraphBuilder:
            return profile.graph(name, weights, precision)

        full = DecoderGraph(graph("decoder"), shape, profile, rotations, kv=options.kv)
        writers: dict[str, DecoderGraph | PerLayerGraphs] = {"full": full}
        if sparse and "st-spattn" in profile.variants:
            start = first_sparse_layer(shape, options.st_spattn_from)
            writers["st-spattn"] = DecoderGraph(graph("decoder-st-spattn"), shape, profile, rotations, start, options.kv)
        if "per-layer" in profile.variants:
            writers["per-layer"] = PerLayerGraphs(graph, shape, profile, rotations)
        for writer in writers.values():
            writer.start()
        for layer in range(shape.layers):
            step = f"decoder layer {layer + 1} of {shape.layers}"
            progress(step)
            done = step in journal.records
            read = backbone.layer(checkpoint.without_reading() if done else checkpoint, shape, layer)
            w = _stored(read, layer, chosen.matrices, samples, rotations, done)
            for writer in writers.values():
                writer.layer(layer, w)
            weights.finish(step)
            del read, w  # free the layer before the next one is read
        progress("head")
        head = table
        if not shape.tied:
            head = head_table(weights, chosen.table, size, lambda: checkpoint.rows("text.lm_head.weight", size))
        final_norm, files = backbone.final_norm(checkpoint, shape), dict[str, str]()
        for writer in writers.values():
            writer.logits(final_norm, head)
        weights.finish("head")
        for variant, writer in writers.items():
            for name, made in writer.graphs(variant).items():
                files[name] = f"{made.name}.onnx"
                made.save(folder / files[name])
    return DecoderFiles(files, table.files)


def _stored(
    read: LayerWeights, layer: int, layout: Layout, samples: Samples | None, rotations: DecoderRotations | None, done: bool
) -> LayerWeights:
    """Return the layer with rounded matrices. Matrices that the checkpoint stores rounded are not rounded again.

    ``done``: whether the layer has already been written to the weights file.
    """
    w = read if rotations is None or done else rotations.layer(read)

    def stored(name: str, matrix: Float32 | Stored) -> Stored:
        if isinstance(matrix, Stored):
            return matrix
        if done:
            return Stored.written(layout, matrix)
        if samples is None:
            return Stored.of(layout, matrix)
        rows = samples[f"layer{layer}.{name}"].astype(np.float32)
        return Stored.of(layout, matrix, hessian(rows if rotations is None else rotations.inputs(name, rows, read)))

    return replace(w, matrices={name: stored(name, matrix) for name, matrix in w.matrices.items()})


def hessian(rows: Float32) -> Float32:
    """Return the Hessian ``x.T @ x / n`` that GPTQ needs, for input rows ``x [n, in]``."""
    product: Float32 = rows.T @ rows / np.float32(len(rows))
    return product


def first_sparse_layer(shape: DecoderShape, wanted: int | None) -> int:
    """Return the first layer with sparse attention, by default ST_SPATTN_FROM or a shallower model's last layer."""
    if wanted is None:
        return min(ST_SPATTN_FROM, shape.layers - 1)
    if not 0 <= wanted < shape.layers:
        raise UserError(f"ST-SpAttn cannot start at layer {wanted}: the model has layers 0 to {shape.layers - 1}")
    return wanted


@dataclass
class DecoderGraph:
    """Builds a decoder graph. Call ``start``, then ``layer`` for each layer in turn, then ``logits``.

    The hidden state is the sum of ``residual`` and ``delta``. ``rotations``: if given, all layers read and write a rotated
    hidden state. ``sparse_from``: the first layer with sparse attention.
    """

    graph: GraphBuilder
    shape: DecoderShape
    profile: Profile
    rotations: DecoderRotations | None = None
    sparse_from: int | None = None
    kv: KVType = "fp32"
    residual: str = ""
    delta: str | None = None
    features: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.operators = self.profile.operators(self.graph, self.shape)
        self.cache = self.profile.cache(self.graph, self.shape, self.kv)
        self.sparse = None
        if self.sparse_from is not None:
            self.sparse = SparseAttention(self.graph, self.shape, Memory(self.graph, self.shape, self.kv))

    def start(self) -> None:
        """Add the inputs that all layers share, and the nodes that prepare them."""
        g, parts = self.graph, 1 + self.shape.deepstack
        self.residual = g.input("inputs_embeds", TensorProto.FLOAT, [1, "S", self.shape.hidden * parts])
        if self.shape.deepstack:
            widths = {str(part): self.shape.hidden for part in range(parts)}
            self.residual, *self.features = self.split("inputs", self.residual, widths)
        self.residual = self.rotated("inputs.rotated", self.residual)
        self.operators.tables()
        self.cache.start()
        g.input("logit_rows", TensorProto.INT64, ["R"])
        if self.sparse is not None:
            self.sparse.inputs()

    def layer(self, layer: int, w: LayerWeights) -> None:
        query, key, value, self.residual = self.project(layer, w, self.residual, self.delta)
        sparse = self.sparse if self.sparse_from is not None and layer >= self.sparse_from else None
        self.after(layer, w, (sparse or self.cache).attend(layer, query, key, value))

    def after(self, layer: int, w: LayerWeights, attention: str) -> None:
        """Add the nodes that follow a layer's attention. The last layer keeps only the rows whose logits are requested."""
        if layer == self.shape.layers - 1:
            attention = self.graph.node("Gather", [attention, "logit_rows"], ["last.attention"], axis=1)
            self.residual = self.graph.node("Gather", [self.residual, "logit_rows"], ["last.residual"], axis=1)
        self.residual, self.delta = self.finish(layer, w, attention, self.residual)
        if layer < self.shape.deepstack:  # after a layer, DeepStack (arXiv 2406.04334) adds the tower's features for that layer
            features = self.features[layer]
            if layer == self.shape.layers - 1:
                features = self.graph.node("Gather", [features, "logit_rows"], ["last.features"], axis=1)
            features = self.rotated(f"layer{layer}.features", features)
            self.delta = self.graph.node("Add", [str(self.delta), features], [f"layer{layer}.with_features"])

    def rotated(self, name: str, rows: str) -> str:
        return rows if self.rotations is None else self.rotations.residual.nodes(self.graph, name, rows)

    def linear(self, name: str, rows: str, w: LayerWeights, matrix: str) -> str:
        """Multiply rows by one of the layer's matrices, and add its bias if it has one."""
        g, weight = self.graph, w.matrices[matrix]
        assert isinstance(weight, Stored)
        product = weight.multiply(g, name, rows)
        if matrix not in w.biases:
            return product
        return g.node("Add", [product, g.weight(f"{name}.bias", w.biases[matrix])], [f"{name}.biased"])

    def split(self, name: str, rows: str, sizes: dict[str, int]) -> list[str]:
        g, outputs = self.graph, [f"{name}.{part}" for part in sizes]
        g.node("Split", [rows, g.integers(*sizes.values())], outputs, axis=-1)
        return outputs

    def head_norm(self, name: str, rows: str, gamma: np.ndarray | None) -> str:
        """RMS-norm each head, or return the rows unchanged if ``gamma`` is None. The shape is ``[1, S, heads D]``."""
        if gamma is None:
            return rows
        g, dim = self.graph, self.shape.head_dim
        heads = g.node("Reshape", [rows, g.integers(1, 0, -1, dim)], [f"{name}.heads"])
        normed, _ = self.operators.norm(name, gamma, heads, None)
        return g.node("Reshape", [normed, g.integers(1, 0, -1)], [f"{name}.joined"])

    def project(self, layer: int, w: LayerWeights, residual: str, delta: str | None) -> tuple[str, str, str, str]:
        """Add the nodes before a layer's attention. Return query, key and value ``[1, S, heads D]``, and the residual."""
        s, name = self.shape, f"layer{layer}"
        normed, residual = self.operators.norm(f"{name}.input_norm", w.norms["input"], residual, delta)
        packed = self.linear(f"{name}.qkv", normed, w, "qkv")
        q, k, v = self.split(f"{name}.qkv", packed, {"q": s.heads * s.head_dim, "k": s.kv_size, "v": s.kv_size})
        q, k = self.head_norm(f"{name}.q_norm", q, w.norms.get("q")), self.head_norm(f"{name}.k_norm", k, w.norms.get("k"))
        table = "local." if s.turns_apart(layer) else ""
        query = self.operators.rotate(f"query{layer}", q, s.heads, table)
        self.graph.output(query, TensorProto.FLOAT, [1, "S", s.heads * s.head_dim])
        return query, self.operators.rotate(f"{name}.key", k, s.kv_heads, table), v, residual

    def finish(self, layer: int, w: LayerWeights, attention: str, residual: str) -> tuple[str, str]:
        """Add the nodes after a layer's attention.

        Return the new residual, and the MLP's output that must be added to the residual.
        """
        g, name, ffn = self.graph, f"layer{layer}", self.shape.intermediate
        projected = self.post_norm(f"{name}.attended", self.linear(f"{name}.output", attention, w, "output"), w)
        normed, residual = self.operators.norm(f"{name}.mlp_norm", w.norms["mlp"], residual, projected)
        packed = self.linear(f"{name}.mlp", normed, w, "gate_up")
        gate, up = self.split(f"{name}.mlp", packed, {"gate": ffn, "up": ffn})
        inner = gate
        if self.shape.gate != "silu":  # GELU as x sigmoid(2 t), where t = sqrt(2 / pi) (x + .044715 x^3)
            squares = g.node("Mul", [gate, gate], [f"{name}.squares"])
            scaled = g.node("Mul", [squares, g.number(0.044715 * GELU)], [f"{name}.squares.scaled"])
            inner = g.node("Mul", [gate, g.node("Add", [scaled, g.number(GELU)], [f"{name}.slope"])], [f"{name}.argument"])
        sigmoid = g.node("Sigmoid", [inner], [f"{name}.sigmoid"])
        gated = g.node("Mul", [g.node("Mul", [gate, sigmoid], [f"{name}.silu"]), up], [f"{name}.gated"])
        if self.rotations is not None:
            gated = self.rotations.gated.nodes(g, f"{name}.gated.rotated", gated)
        return residual, self.post_norm(f"{name}.passed", self.linear(f"{name}.down", gated, w, "down"), w)

    def post_norm(self, name: str, rows: str, w: LayerWeights) -> str:
        """Apply the norm after attention or MLP, or return the rows unchanged if the layer has no such norm."""
        gain = w.norms.get(name.rpartition(".")[2])
        return rows if gain is None else self.operators.norm(f"{name}.norm", gain, rows, None)[0]

    def logits(self, final_norm: np.ndarray, head: WeightTable) -> None:
        """Add the final norm, the head and the output ``logits``. The shape is ``[1, R, V]``."""
        s, g = self.shape, self.graph
        residual, delta = self.residual, self.delta
        if self.rotations is not None:
            rows = g.node("Add", [residual, str(delta)], ["last.rotated"])
            residual, delta = self.rotations.residual.nodes(g, "last.hidden", rows, inverse=True), None
        normed, _ = self.operators.norm("final_norm", final_norm, residual, delta)
        rows = g.node("Reshape", [normed, g.integers(-1, s.hidden)], ["rows"])
        scores = head.multiply(g, "head", rows)
        g.output(g.node("Reshape", [scores, g.integers(1, -1, s.vocab)], ["logits"]), TensorProto.FLOAT, [1, "R", s.vocab])

    def graphs(self, variant: str) -> dict[str, GraphBuilder]:
        return {variant: self.graph}


@dataclass(slots=True)
class PerLayerGraphs:
    """Builds a decoder as L + 1 graphs without attention, which the caller computes between two graphs.

    ``graph(name)`` makes an empty graph. ``per-layer0`` projects the input rows to layer 0's query, key and value.
    ``per-layer{l}`` reads the attention of layer ``l - 1``, finishes that layer and projects layer ``l``. ``per-layer{L}``
    returns logits.

        per-layer0    inputs_embeds [1, S, E]   cos, sin [1, S, D/2]
        per-layer{l}  layer{l-1}.attention [1, S, Hq D]   the residual of the graph before (inputs_embeds for l = 1)
                      cos, sin (l < L) or logit_rows int64 [R] (l = L)   with DeepStack features{l-1} [1, S, E]
        outputs       query [1, S, Hq D], key, value [1, S, Hkv D] and the residual of layer l, in this order; for l = L:
                      logits [1, R, V]

    With rotations, ``per-layer0`` also returns the rotated rows as the residual for ``per-layer1``.
    """

    graph: Callable[[str], GraphBuilder]
    shape: DecoderShape
    profile: Profile
    rotations: DecoderRotations | None = None
    parts: list[DecoderGraph] = field(default_factory=list)

    def start(self) -> None:
        part = self._opened()
        part.operators.tables()
        rows = part.graph.input("inputs_embeds", TensorProto.FLOAT, [1, "S", self.shape.hidden])
        part.residual = part.rotated("inputs.rotated", rows)

    def layer(self, layer: int, w: LayerWeights) -> None:
        """End the current graph with the layer's projections, and begin the next graph after the layer's attention."""
        s, before = self.shape, self.parts[-1]
        _, key, value, residual = before.project(layer, w, before.residual, before.delta)
        for name, width in {key: s.kv_size, value: s.kv_size, residual: s.hidden}.items():
            if name != "inputs_embeds":
                before.graph.output(name, TensorProto.FLOAT, [1, "S", width])
        part = self._opened()
        attention = part.graph.input(f"layer{layer}.attention", TensorProto.FLOAT, [1, "S", s.heads * s.head_dim])
        part.residual = part.graph.input(residual, TensorProto.FLOAT, [1, "S", s.hidden])
        if layer < s.deepstack:
            part.graph.input(f"features{layer}", TensorProto.FLOAT, [1, "S", s.hidden])
        if layer == s.layers - 1:
            part.graph.input("logit_rows", TensorProto.INT64, ["R"])
        else:
            part.operators.tables()
        part.after(layer, w, attention)

    def logits(self, final_norm: np.ndarray, head: WeightTable) -> None:
        self.parts[-1].logits(final_norm, head)

    def graphs(self, variant: str) -> dict[str, GraphBuilder]:
        return {f"{variant}{index}": part.graph for index, part in enumerate(self.parts)}

    def _opened(self) -> DecoderGraph:
        part = DecoderGraph(self.graph(f"decoder-per-layer-{len(self.parts)}"), self.shape, self.profile, self.rotations)
        part.graph.for_cpu = True
        part.features = [f"features{layer}" for layer in range(self.shape.deepstack)]
        self.parts.append(part)
        return part
