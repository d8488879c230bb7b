"""The decoder graph, built by hand from weights.

Traced decoders concatenate their cache; this one appends in place to memory it does not own. Profile onnxruntime:

    inputs   inputs_embeds [1, S, E (1 + K)]   cos, sin [1, S, D/2]   total_len int32 [L]   logit_rows int64 [R]
             key{l}, value{l} [1, Hkv, C_l, D], and with int8 key_scale{l}, value_scale{l} [1, Hkv, 1, D]
    outputs  logits [1, R, V]   key{l}_out, value{l}_out: to be bound to the addresses of key{l}, value{l}
             query{l} [1, S, Hq D], rotated: probes, which cost nothing unless fetched

K is 0, but for DeepStack: then columns ``(1 + l) E ..`` of a row are added to it after layer ``l``, zeros for text.
``total_len[l]`` counts the rows valid in layer ``l`` after the call. A layer is three functions: ``project`` (residual
to q, k, v), ``attend`` (the only one that knows the cache) and ``finish`` (to residual again), so that a graph can be
split between them.

What differs by profile, norms, rotary positions and ``attend``, is in :mod:`edgevlm.export.profiles`; docs/internals/engines.md
has the inputs and outputs of those for TensorRT.

Graphs of one builder (:mod:`edgevlm.export.layers`) and one weights file: ``full``; ``st-spattn`` for the prefill of frames,
in which the layers from one on attend by the pattern of :mod:`edgevlm.export.st_spattn` and which has its two inputs more. A
bundle of another KV precision has ``full`` in fp32 besides, as ``fp32-kv``: what scales are measured with, and errors.
``per-layer0`` to ``per-layer{L}`` are ``full`` split between the layers' projections and their attention
(:class:`PerLayerGraphs`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgevlm.errors import UserError
from edgevlm.export.backbones import Backbone, DecoderShape, LayerWeights
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.graph import ExportJournal, GraphBuilder, WeightsFile
from edgevlm.export.layers import DecoderGraph, PerLayerGraphs
from edgevlm.export.precisions import DEFAULT_PRECISION, Float32, Layout, Stored
from edgevlm.export.precisions.table import head_table, write_table
from edgevlm.export.profiles import Profile, load_profile
from edgevlm.export.samples import Samples, hessian
from edgevlm.progress import Notify
from edgevlm.runtime.graph_profiles import ONNXRUNTIME
from edgevlm.runtime.kv import KVType

GRAPHS = {  # variant -> file; of per-layer{l} decoder-per-layer-{l}.onnx
    "full": "decoder.onnx",
    "st-spattn": "decoder-st-spattn.onnx",
    "fp32-kv": "decoder-fp32-kv.onnx",
}
WEIGHTS = "decoder.weights"
MATRICES = ("qkv", "output", "gate_up", "down")  # of a layer
ST_SPATTN_FROM = 3  # the first sparse layer: the one above PureKV's CLIE layer, whose scores need dense attention


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
    progress: Notify,
    st_spattn_from: int | None = None,
    sparse: bool = True,
    precision: str = DEFAULT_PRECISION,
    samples: Samples | None = None,
    journal: ExportJournal | None = None,
    kv: KVType = "fp32",
    profile: str = ONNXRUNTIME,
) -> DecoderFiles:
    """Write the graphs of the profile, ``decoder.weights`` and the embedding into ``folder``.

    Without ``sparse`` there is no ``st-spattn`` graph: frames of some families have text between them. ``st_spattn_from``: see
    :func:`first_sparse_layer`. ``kv``: what they keep keys and values as; unless fp32 there is ``fp32-kv`` too. A tied head is
    the embedding's files themselves: the graphs refer to their bytes. ``precision``: of matrices, embedding and head; see
    :mod:`edgevlm.export.precisions`. With ``samples`` matrices are rounded by GPTQ for inputs like those; see
    :mod:`edgevlm.export.precisions.rounding`. What ``journal`` has is not written again. Raises UserError for a checkpoint
    whose tensors are missing or of another shape and for a precision that is not known, OSError if the disk does not take them.
    """
    written_for = load_profile(profile)
    chosen, journal, size = written_for.precision(precision), journal or ExportJournal(), (shape.vocab, shape.hidden)
    sparse_from = first_sparse_layer(shape, st_spattn_from)
    progress("embedding")
    table = write_table(folder, chosen.table, size, lambda: checkpoint.rows("text.embed_tokens.weight", size), journal)
    with (folder / WEIGHTS).open("r+b" if journal.values(WEIGHTS) else "w+b") as stream:
        weights = WeightsFile(stream, WEIGHTS, journal)
        variants = _variants(written_for, weights, shape, precision, sparse_from if sparse else None, kv)
        per_layer = _per_layer(written_for, weights, shape, precision, kv)
        writers: list[DecoderGraph | PerLayerGraphs] = [*variants.values(), *per_layer]
        for d in writers:
            d.start()
        for layer in range(shape.layers):
            step = f"decoder layer {layer + 1} of {shape.layers}"
            progress(step)
            done = step in journal.records
            read = backbone.layer(checkpoint.without_reading() if done else checkpoint, shape, layer)
            w = _stored(read, layer, chosen.matrices, samples, done)
            for d in writers:
                d.layer(layer, w)
            weights.finish(step)
            del read, w  # before the next layer is read
        progress("head")
        head = table
        if not shape.tied:
            head = head_table(weights, chosen.table, size, lambda: checkpoint.rows("text.lm_head.weight", size))
        final_norm = checkpoint.tensor("text.norm.weight", (shape.hidden,))
        for d in writers:
            d.logits(final_norm, head)
        weights.finish("head")
        graphs = {variant: d.graph for variant, d in variants.items()}
        for parts in per_layer:
            graphs |= parts.graphs()
        for graph in graphs.values():
            graph.save(folder / f"{graph.name}.onnx")
    return DecoderFiles({variant: f"{graph.name}.onnx" for variant, graph in graphs.items()}, table.files)


def _variants(
    profile: Profile, weights: WeightsFile, shape: DecoderShape, precision: str, sparse_from: int | None, kv: KVType
) -> dict[str, DecoderGraph]:
    """The graphs to be written, by variant."""

    def graph(variant: str) -> GraphBuilder:
        return profile.graph(Path(GRAPHS[variant]).stem, weights, precision)

    made: dict[str, DecoderGraph] = {"full": DecoderGraph(graph("full"), shape, profile, kv=kv)}
    if sparse_from is not None and "st-spattn" in profile.variants:
        made["st-spattn"] = DecoderGraph(graph("st-spattn"), shape, profile, sparse_from, kv)
    if kv != "fp32" and "fp32-kv" in profile.variants:
        made["fp32-kv"] = DecoderGraph(graph("fp32-kv"), shape, profile)
    return made


def _per_layer(profile: Profile, weights: WeightsFile, shape: DecoderShape, precision: str, kv: KVType) -> list[PerLayerGraphs]:
    """The per-layer graphs, where the profile has them."""
    if "per-layer" not in profile.variants:
        return []
    return [PerLayerGraphs(lambda name: profile.graph(name, weights, precision), shape, profile, kv)]


def _stored(
    w: LayerWeights[Float32 | Stored], index: int, layout: Layout, samples: Samples | None, done: bool
) -> LayerWeights[Stored]:
    """The layer with its matrices rounded, once for all graphs, unless the checkpoint has them so; ``done``: in the file."""

    def stored(name: str, matrix: Float32 | Stored) -> Stored:
        if isinstance(matrix, Stored):
            return matrix
        if done:
            return Stored.written(layout, matrix)
        return Stored.of(layout, matrix, None if samples is None else hessian(samples, index, name))

    matrices: Any = {name: stored(name, getattr(w, name)) for name in MATRICES}
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
