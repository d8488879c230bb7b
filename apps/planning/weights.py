"""Bytes of a model's weights by precision: in a bundle that ONNX Runtime reads, and in TensorRT's engines."""

from __future__ import annotations

from dataclasses import dataclass

from edgevlm.apps.planning.shape import PlannedModel
from edgevlm.errors import UserError

BLOCK = 32  # weights that share a scale


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes of one weight: of the layers' matrices, of embedding and head, of norms and biases, and of the tower."""

    matrix: float
    table: float
    vector: float
    tower: float


def blocks_of(bits: int, scale: float, zeros: bool = False) -> float:
    """Bytes of a weight of ``bits`` in blocks of 32: bits / 8 + (scale + bits / 8 of a zero point) / 32.

    scale: bytes of a block's scale. 4 bits are 5 with float32 scales, 4.5 with float16; zero points add 1/8 of a bit.
    """
    return bits / 8 + (scale + (bits / 8 if zeros else 0.0)) / BLOCK


# ONNX Runtime's bundles: scales in float32, embedding and head in 8 bits with both of the smaller precisions, tower in float32.
BUNDLES = {
    "fp32": Storage(4, 4, 4, 4),
    "fp16": Storage(2, 2, 4, 4),
    "int8": Storage(blocks_of(8, 4), blocks_of(8, 4), 4, 4),
    "int4": Storage(blocks_of(4, 4), blocks_of(8, 4), 4, 4),
    "int4-zp": Storage(blocks_of(4, 4, zeros=True), blocks_of(8, 4), 4, 4),
}
# TensorRT's engines: scales, embedding, head and tower in float16.
ENGINES = {
    "fp32": Storage(4, 4, 4, 4),
    "fp16": Storage(2, 2, 2, 2),
    "int8": Storage(blocks_of(8, 2), 2, 2, 2),
    "int4": Storage(blocks_of(4, 2), 2, 2, 2),
    "int4-zp": Storage(blocks_of(4, 2, zeros=True), 2, 2, 2),
}


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of the decoder's layers, the table of embeddings, a head of its own (0 where it is that table) and the tower."""

    layers: int
    embedding: int
    head: int
    tower: int

    @property
    def total(self) -> int:
        return self.layers + self.embedding + self.head + self.tower


def matrices_in(size: int, head: int, precision: str) -> int:
    """Parameters of the layers' matrices in a bundle's file of ``size`` bytes, a head of ``head`` numbers taken off.

    Norms and biases are counted among them; their bytes are few.
    """
    storage = BUNDLES[precision]
    return max(0, round((size - head * storage.table) / storage.matrix))


def weights_of(model: PlannedModel, precision: str, kind: str) -> Weights:
    """The weights of ``model`` at a precision, in a bundle, or with ``kind`` jetson in an engine.

    A bundle has the sizes of its own files at its own precision. Raises UserError for another one of a bundle that is rounded
    already: what it was rounded from is not in it.
    """
    engine = kind == "jetson"
    if model.files and precision == model.precision and not engine:
        files = model.files
        head = 0 if model.tied else round(model.table * BUNDLES[precision].table)
        return Weights(files["decoder"] - head, files["embedding"], head, files["vision"])
    if model.files and model.precision != "fp32":
        raise UserError(
            f"{model.name}: is a bundle of {model.precision} weights; give that --precision, or plan its checkpoint"
        )
    storage = (ENGINES if engine else BUNDLES)[precision]
    table = round(model.table * storage.table)
    return Weights(
        layers=round(model.matrices * storage.matrix + model.vectors * storage.vector),
        embedding=table,
        head=0 if model.tied else table,
        tower=round(model.tower.parameters * storage.tower),
    )
