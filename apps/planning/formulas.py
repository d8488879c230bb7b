"""Predict a model's memory by formulas and its speed by a roofline model, from a device's constants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from edgevlm.apps.planning.model import PlannedModel, layer_matrices
from edgevlm.engines.devices import DeviceProfile
from edgevlm.engines.tensorrt.jobs import RUNTIME, build_need
from edgevlm.errors import UserError
from edgevlm.export.precisions import load_precision
from edgevlm.runtime.cache import KVCache, row_bytes
from edgevlm.runtime.kv import DTYPES
from edgevlm.runtime.settings import LONGEST_QUESTION

FLOAT = 4
THUMBNAILS = 2000 << 10  # bytes of memory that SQLite uses for the thumbnails' file
CPU_RUNTIME = 27_600_000
"""Bytes of ONNX Runtime and our own code, graphs and sessions on an x86-64 CPU: between the demo's and a small tower's."""
POLICY_ROW = 12  # largest number of bytes that a policy keeps per row, layer and KV head: a float32 score and an int64 seq
BANDWIDTH_EFFICIENCY = 0.75
"""Fraction of memory bandwidth that kernels which stream weights reach. Chosen before any comparison."""
COMPUTE_EFFICIENCY = 0.5
"""Fraction of peak arithmetic that products of some hundred rows reach. Chosen before any comparison."""
QUESTION = 32  # assumed length of a question in tokens, including the chat template
COMPRESSION_READS = 4.0
EXPORT = 1 << 29  # bytes that an export needs in addition to the model's largest layer
MOST_CAMERAS = 256


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """The predicted memory in bytes of a running stream, an export and TensorRT's builder.

    ``activations`` is the decoder's working memory. ``vision`` is the tower's memory, including pixels and features.
    ``snapshots`` counts a server's snapshot copies and thumbnails.
    """

    weights: int
    kv: int
    policy: int
    activations: int
    vision: int
    runtime: int
    snapshots: int
    export_peak: int
    build_peak: int

    @property
    def total(self) -> int:
        """Return a running stream's memory: all parts together, because ONNX Runtime keeps working memory between calls."""
        return self.weights + self.kv + self.policy + self.activations + self.vision + self.runtime + self.snapshots


@dataclass(frozen=True, slots=True)
class Weights:
    """The sizes in bytes of the decoder's layers, the embedding table, the head and the vision tower.

    ``head`` is 0 if the head shares the embedding table.
    """

    layers: int
    embedding: int
    head: int
    tower: int

    @property
    def total(self) -> int:
        return self.layers + self.embedding + self.head + self.tower


@dataclass(frozen=True, slots=True)
class RooflineCall:
    """The seconds that a model call needs for arithmetic and for memory traffic. The call takes the longer of these times."""

    compute: float
    traffic: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.traffic)

    @property
    def term(self) -> str:
        """Return what limits the call: ``compute`` or ``memory bandwidth``."""
        return "compute" if self.compute > self.traffic else "memory bandwidth"


@dataclass(frozen=True, slots=True)
class Speed:
    """The predicted speed of a stream with a given budget.

    ``j_per_frame`` is an upper bound: the device's largest power budget multiplied by the time that a frame takes. ``bound_by``
    names the largest part of a frame's time: vision, compute or memory bandwidth.
    """

    prefill_fps: float
    ttft_ms: float
    tokens_per_s: float
    j_per_frame: float | None
    bound_by: str
    vision_ms: float
    prefill_ms: float
    compression_ms: float


def weights_of(model: PlannedModel, precision: str, kind: str) -> Weights:
    """Return the sizes of ``model``'s weights at a precision, in a bundle or (on a Jetson) in TensorRT's engines.

    If ``precision`` is the bundle's own, the sizes are those of the bundle's files. Raises UserError if the weights are already
    rounded to a different precision.
    """
    stored = load_precision(precision)
    engine = kind == "jetson" and stored.tensorrt is not None  # if TensorRT lacks the precision, ONNX Runtime runs the model
    layouts = stored.tensorrt if engine and stored.tensorrt else stored.onnxruntime
    table = round(model.table * layouts.table.bytes_per_weight())
    head = 0 if model.tied else table
    if model.files and precision == model.precision and not engine:
        return Weights(model.files["decoder"] - head, model.files["embedding"], head, model.files["vision"])
    if precision != model.precision != "fp32":
        raise UserError(f"{model.name}: the weights are already {model.precision}; remove --precision")
    other = 2 if engine and precision != "fp32" else FLOAT  # bytes per number in the tower, norms and biases
    tower = model.tower
    linears = tower.block_parameters + tower.projector_parameters if tower.precision == "int8" else 0  # parameters of one byte
    rounded = (model.matrices - model.floats) * layouts.matrices.bytes_per_weight(model.group)
    layers = round(rounded + model.floats * FLOAT + model.vectors * other)
    return Weights(layers, table, head, round(linears + other * (tower.parameters - linears)))


def arena_bytes(model: PlannedModel, budget: int, kv: str) -> int:
    """Return the bytes of a stream's cache, like ``KVCache.bytes_for``. Each layer has rows for prefix, budget and text."""
    shape = (model.layers, model.kv_heads, model.head_dim, model.capacity(budget))
    return KVCache.bytes_for(*shape, inv_freq=np.ones(model.head_dim // 2), axes=model.axes, dtype=kv)


def policy_bytes(model: PlannedModel, budget: int) -> int:
    """Return the most bytes that a policy's state takes: POLICY_ROW for each row of the cache, in each layer and KV head."""
    return POLICY_ROW * model.layers * model.kv_heads * (model.prefix + budget)


def activation_bytes(model: PlannedModel, budget: int, chunk: int, kind: str) -> int:
    """Return the decoder's working memory in its largest call, which appends up to ``chunk`` frames to an empty memory.

    I and E are the widths of the MLP and the residual stream. Q and K are the total widths of the query heads and of the key
    heads. On a CPU, each row takes 6 I + 3 E + 3 Q + 4 K float32 numbers, plus three copies of its input. An input row has E (1
    + deepstack) numbers. On a GPU, each row takes 3 I + 4 E float16 numbers, plus one copy of its input.
    """
    frame = model.tower.rows
    rows = max(frame, min(max(1, chunk // model.tower.group) * frame, budget))
    inner, width = model.inner, model.hidden
    entering = width * (1 + model.deepstack)
    if kind != "cpu":
        return 2 * rows * (3 * inner + 4 * width + entering)
    return FLOAT * rows * (6 * inner + 3 * width + model.head_dim * (3 * model.heads + 4 * model.kv_heads) + 3 * entering)


def chunk_bytes(model: PlannedModel, chunk: int, copies: int = 1) -> int:
    """Return the bytes of a chunk's features and pixels in float32. ``copies``: the number of copies of the pixels."""
    tower = model.tower
    grids = max(1, chunk // tower.group)
    features = grids * tower.tokens * model.hidden * (1 + model.deepstack)
    return FLOAT * (copies * grids * tower.group * 3 * tower.size[0] * tower.size[1] + features)


def vision_bytes(model: PlannedModel, chunk: int, kind: str) -> int:
    """Return the tower's working memory for ``chunk`` frames, including their features and two copies of their pixels.

    N is the number of patches in a grid, W the width of the tower and I the width of its MLP. On a CPU, each grid needs 4 N W
    float32 numbers for attention and N (3 I + 2 W) for the MLP. A float32 tower runs all grids at once; other towers run them
    one by one. On a GPU, each grid needs N (I + 4 W) float16 numbers.
    """
    tower = model.tower
    if kind != "cpu":
        return chunk_bytes(model, chunk, 2) + 2 * tower.patches * (tower.inner + 4 * tower.width)
    at_once = max(1, chunk // tower.group) if tower.precision == "fp32" else 1
    return chunk_bytes(model, chunk, 2) + FLOAT * at_once * tower.patches * (3 * tower.inner + 6 * tower.width)


def snapshot_bytes(model: PlannedModel, budget: int, chunk: int, kv: str) -> int:
    """Return the bytes of a snapshot with its thumbnails. A snapshot contains a chunk, and the cache without its text rows."""
    row = 2 * model.head_dim * DTYPES[kv].itemsize + row_bytes(model.axes)
    return model.layers * (model.prefix + budget) * model.kv_heads * row + chunk_bytes(model, chunk) + THUMBNAILS


def camera_bytes(model: PlannedModel, budget: int, chunk: int, kv: str) -> int:
    """Return the bytes of memory that a server needs for each further camera. All cameras share the weights."""
    own = arena_bytes(model, budget, kv) + policy_bytes(model, budget) + chunk_bytes(model, chunk)
    return own + snapshot_bytes(model, budget, chunk, kv)


def question_bytes(model: PlannedModel, budget: int, kv: str) -> int:
    """Return the size in bytes of a cache enlarged for the longest question, or 0 if the model has no positions left."""
    set_aside, spare = model.text_rows - model.closing, model.most_budget - budget
    longer = min(LONGEST_QUESTION, set_aside + spare) - set_aside
    return arena_bytes(model, budget + longer, kv) if longer > 0 else 0


@dataclass(frozen=True)
class Roofline:
    """Predicts a model's memory and speed on a device. ``served``: the number of a server's cameras, or 0 for ``edgevlm
    run``."""

    model: PlannedModel
    device: DeviceProfile
    precision: str
    kv: str
    served: int = 0

    @cached_property
    def weights(self) -> Weights:
        return weights_of(self.model, self.precision, self.device.kind)

    @property
    def resident_weights(self) -> int:
        """Return the memory in bytes that the weights take while a stream runs.

        On a CPU, ONNX Runtime repacks matrices for its kernels (float16 as float32), including a tied head. The embedding stays
        on disk. TensorRT's weights have the same size in memory as on disk.
        """
        weights, layouts, group = self.weights, load_precision(self.precision).onnxruntime, self.model.group
        if self.device.kind != "cpu":
            return weights.total
        matrices = layouts.matrices.packed_bytes_per_weight(group) / layouts.matrices.bytes_per_weight(group)
        head = layouts.table.packed_bytes_per_weight() / layouts.table.bytes_per_weight()
        return round(matrices * weights.layers + head * (weights.head or weights.embedding)) + weights.tower

    def memory(self, budget: int, chunk: int) -> PlannedMemory:
        """Return the memory of all cameras, each with ``budget`` vision tokens per layer and chunks of ``chunk`` frames."""
        model, kind, streams = self.model, self.device.kind, max(1, self.served)
        layer = layer_matrices(model.hidden, model.heads, model.kv_heads, model.head_dim, model.inner)
        return PlannedMemory(
            weights=self.resident_weights,
            kv=streams * arena_bytes(model, budget, self.kv),
            policy=streams * policy_bytes(model, budget),
            activations=activation_bytes(model, budget, chunk, kind),
            vision=vision_bytes(model, chunk, kind) + (streams - 1) * chunk_bytes(model, chunk),
            runtime=CPU_RUNTIME if kind == "cpu" else RUNTIME,
            snapshots=self.served * snapshot_bytes(model, budget, chunk, self.kv),
            export_peak=FLOAT * layer + EXPORT,
            build_peak=build_need(self.weights.total, 0).host if kind == "jetson" else 0,
        )

    def _rate(self, integer: bool, wide: bool) -> float:
        """Return the device's speed of matrix products, in operations per second.

        ``integer`` is true if a CPU multiplies the matrices as int8. ``wide`` is true if a GPU multiplies in float32, not
        float16.
        """
        if self.device.kind == "cpu":
            found = self.device["int8_tops" if integer else "fp32_tflops"]
        else:
            found = self.device["fp32_tflops" if wide else "fp16_tflops"]
        return 1e12 * float(found) * COMPUTE_EFFICIENCY

    @property
    def bandwidth(self) -> float:
        """Return the memory bandwidth in bytes per second."""
        return 1e9 * float(self.device["bandwidth_gb_s"]) * BANDWIDTH_EFFICIENCY

    def vision(self) -> RooflineCall:
        """Return the cost of encoding one grid. A grid is made of the frames that the vision tower encodes together.

        The cost is 2 P_block N + 2 P_projector R + 4 B N A W operations and one reading of the tower's weights. The B blocks
        have width W and P_block parameters in total; each of N patches attends to A patches. The projector's input has R rows.
        """
        tower = self.model.tower
        attention = 4 * tower.blocks * tower.patches * tower.attended * tower.width
        matrices = 2 * (tower.block_parameters * tower.patches + tower.projector_parameters * tower.projected)
        wide = self.precision == "fp32"
        seconds = matrices / self._rate(tower.precision == "int8", wide) + attention / self._rate(False, wide)
        return RooflineCall(seconds, self.weights.tower / self.bandwidth)

    def prefill(self, rows: int, held: int, calls: float = 1.0, logits: bool = False) -> RooflineCall:
        """Return the cost of ``calls`` decoder calls that append ``rows`` rows to ``held`` cached rows.

        The layers' matrices, with P parameters, cost 2 P operations a row. Attention, with H heads of size D in L layers, costs
        4 L H D (held + rows / 2) operations a row. If ``logits`` is true, a row of logits costs 2 V E operations more, where V
        is the vocabulary's size and E the width, and the head's weights are read once. Each call reads the layers' weights and
        the cached rows.
        """
        model, weights = self.model, self.weights
        seen = held + rows / 2
        matrices, attention = 2 * model.matrices * rows, 4 * model.layers * model.heads * model.head_dim * rows * seen
        read = calls * (weights.layers + self.kv_bytes(held))
        if logits:
            attention += 2 * model.table  # logits, counted with the attention as float operations
            read += weights.head or weights.embedding
        wide, layout = self.precision == "fp32", load_precision(self.precision).onnxruntime.matrices
        seconds = matrices / self._rate(layout.multiplies_bytes, wide) + attention / self._rate(False, wide)
        return RooflineCall(seconds, read / self.bandwidth)

    def kv_bytes(self, rows: int) -> float:
        """Return the size in bytes of ``rows`` rows of keys and values in all layers."""
        return 2 * self.model.layers * self.model.kv_heads * self.model.head_dim * rows * DTYPES[self.kv].itemsize

    def token(self, held: int) -> RooflineCall:
        """Return the cost of generating one answer token when the cache holds ``held`` rows."""
        return self.prefill(1, held, logits=True)

    def speed(self, budget: int, chunk: int) -> Speed:
        """Return the speed when every layer holds ``budget`` vision tokens and ``chunk`` frames are appended at once.

        A frame's time has two parts: its share of its grid's time in the tower and the decoder, and its share of the time in
        which its chunk is compressed. Each compression reads the cache ``COMPRESSION_READS`` times.
        """
        tower, held = self.model.tower, self.model.prefix + budget
        grids = max(1, chunk // tower.group)
        vision = self.vision()
        prefill = self.prefill(tower.rows, held, calls=1 / grids)
        compression = COMPRESSION_READS * self.kv_bytes(held) / self.bandwidth / grids
        frame = (vision.seconds + prefill.seconds + compression) / tower.group
        seconds_of = {"vision": vision.seconds, "compute": 0.0, "memory bandwidth": compression}
        seconds_of[prefill.term] += prefill.seconds
        watts = self.device["max_watts"]
        return Speed(
            prefill_fps=1 / frame,
            ttft_ms=1e3 * self.prefill(QUESTION, held, logits=True).seconds,
            tokens_per_s=1 / self.token(held + QUESTION).seconds,
            j_per_frame=None if watts is None else float(watts) * frame,
            bound_by=max(seconds_of, key=lambda term: seconds_of[term]),
            vision_ms=1e3 * vision.seconds / tower.group,
            prefill_ms=1e3 * prefill.seconds / tower.group,
            compression_ms=1e3 * compression / tower.group,
        )

    def can_run(self, budget: int, chunk: int, fps: float) -> bool:
        """Return whether ``budget`` is valid, fits in memory and lets every camera reach ``fps`` frames a second."""
        if not self.model.least_budget <= budget <= self.model.most_budget:
            return False
        fits = self.memory(budget, chunk).total <= self.device.usable_bytes
        return fits and self.speed(budget, chunk).prefill_fps >= max(1, self.served) * fps

    def largest_budget(self, chunk: int, fps: float) -> int:
        """Return the largest budget that can run at ``fps``, or 0."""
        return largest(self.model.least_budget, self.model.most_budget, lambda budget: self.can_run(budget, chunk, fps))

    def most_cameras(self, budget: int, chunk: int, fps: float) -> int:
        """Return how many cameras, each with this ``budget``, a server can watch at ``fps``."""
        return largest(1, MOST_CAMERAS, lambda cameras: replace(self, served=cameras).can_run(budget, chunk, fps))


def largest(least: int, most: int, holds: Callable[[int], bool]) -> int:
    """Return the largest integer from ``least`` to ``most`` for which ``holds`` is true, or 0. ``holds`` must be monotonic."""
    if most < least or not holds(least):
        return 0
    low, high = least, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
