"""Bytes of a model's weights by precision: in a bundle that ONNX Runtime reads, and in TensorRT's engines."""

from __future__ import annotations

from dataclasses import dataclass

from edgevlm.apps.planning.shape import PlannedModel
from edgevlm.errors import UserError


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes of one weight: of the layers' matrices, of embedding and head, of norms and biases, and of the tower.

    block: bytes that a group of a matrix's weights takes beside their codes, for a scale and a zero point.
    """

    codes: float
    table: float
    vector: float
    tower: float
    block: float = 0.0

    def matrix(self, group: int) -> float:
        """Of a matrix in groups of ``group`` weights: codes + block / group.

        In groups of 32, 4 bits are 5 with float32 scales, 4.5 with float16; zero points add 1/8 of a bit.
        """
        return self.codes + self.block / group


ROUNDED = 1 + 4 / 32  # a weight of embedding and head in 8 bits, in blocks of 32 with float32 scales
# ONNX Runtime's bundles, as edgevlm.export.precisions stores them (which needs packages that a plan of a bundle does without).
BUNDLES = {
    "fp32": Storage(4, 4, 4, 4),
    "fp16": Storage(2, 2, 4, 4),
    "int8": Storage(1, ROUNDED, 4, 4, block=4),
    "int4": Storage(0.5, ROUNDED, 4, 4, block=4),
    "int4-zp": Storage(0.5, ROUNDED, 4, 4, block=4.5),
}
# TensorRT's engines: scales, embedding, head and tower in float16; int8 has one scale a channel.
ENGINES = {
    "fp32": Storage(4, 4, 4, 4),
    "fp16": Storage(2, 2, 2, 2),
    "int8": Storage(1, 2, 2, 2),
    "int4": Storage(0.5, 2, 2, 2, block=2),
    "int4-zp": Storage(0.5, 2, 2, 2, block=2.5),
}

ENGINE_GROUP = 128  # of int4 there, where it divides the input's width


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


def weights_of(model: PlannedModel, precision: str, kind: str) -> Weights:
    """The weights of ``model`` at a precision, in a bundle, or with ``kind`` jetson in an engine.

    A bundle has the sizes of its own files at its own precision. Raises UserError for another one of what is rounded already:
    what it was rounded from is not in it.
    """
    engine = kind == "jetson"
    if model.files and precision == model.precision and not engine:
        files = model.files
        head = 0 if model.tied else round(model.table * BUNDLES[precision].table)
        return Weights(files["decoder"] - head, files["embedding"], head, files["vision"])
    if precision != model.precision != "fp32":
        what, way_out = ("a bundle", "its checkpoint") if model.files else ("a checkpoint", "the one before it was rounded")
        raise UserError(f"{model.name}: is {what} of {model.precision} weights; leave --precision out, or plan {way_out}")
    storage, group = (ENGINES[precision], ENGINE_GROUP) if engine else (BUNDLES[precision], model.group)
    table = round(model.table * storage.table)
    return Weights(
        layers=round(model.matrices * storage.matrix(group) + model.vectors * storage.vector),
        embedding=table,
        head=0 if model.tied else table,
        tower=round(model.tower.parameters * storage.tower),
    )
