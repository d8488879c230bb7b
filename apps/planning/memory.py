"""The account of a model's memory on a device, in bytes: a function with its formula for each part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgevlm.apps.planning.model import PlannedModel, layer_matrices
from edgevlm.engines.devices import DeviceProfile
from edgevlm.engines.tensorrt.jobs import RUNTIME, build_need
from edgevlm.errors import UserError
from edgevlm.export.families import TowerGeometry
from edgevlm.export.memory import needed_memory
from edgevlm.export.precisions import load_precision
from edgevlm.runtime.cache import KVCache, row_bytes
from edgevlm.runtime.kv import DTYPES

THUMBNAILS = 2000 << 10  # bytes of their file that SQLite keeps in memory
FLOAT = 4
CPU_RUNTIME = 27_600_000
"""ONNX Runtime and our own code, graphs and sessions on a CPU: between the demo's and a small tower's, x86-64."""
POLICY_ROW = 12  # bytes that a policy may keep per row, layer and KV head: a float32 score and an int64 seq


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """Bytes of each part while a stream runs, and the peaks of export and build.

    kv: the cache's arena; policy: its state beside the cache; activations: working memory of the decoder; vision: of the tower,
    with pixels and features; runtime: libraries, graphs, sessions; snapshots: a server's copies of memories, and thumbnails.
    export_peak: of ``edgevlm export``; build_peak: of TensorRT's builder, 0 without one. present, tower_cache: of each camera
    if only changes are appended and encoded; not in the total.
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
    present: int
    tower_cache: int

    @property
    def total(self) -> int:
        """The most that all streams take together; ONNX Runtime's sessions keep their working memory."""
        return self.weights + self.kv + self.policy + self.activations + self.vision + self.runtime + self.snapshots


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of the decoder's layers, the table of embeddings, the head (0 if it is that table) and the tower."""

    layers: int
    embedding: int
    head: int
    tower: int

    @property
    def total(self) -> int:
        return self.layers + self.embedding + self.head + self.tower


def weights_of(model: PlannedModel, precision: str, kind: str) -> Weights:
    """The weights of ``model`` at a precision, in a bundle or, for a ``kind`` of jetson, in TensorRT's engines.

    A bundle has its files' sizes at its own precision. Raises UserError for another precision of rounded weights.
    """
    stored = load_precision(precision)
    engine = kind == "jetson" and stored.tensorrt is not None  # ONNX Runtime runs the rest
    layouts = stored.tensorrt if engine and stored.tensorrt else stored.onnxruntime
    if model.files and precision == model.precision and not engine:
        files = model.files
        head = 0 if model.tied else round(model.table * layouts.table.bytes_per_weight())
        return Weights(files["decoder"] - head, files["embedding"], head, files["vision"])
    if precision != model.precision != "fp32":
        what, way_out = ("a bundle", "its checkpoint") if model.files else ("a checkpoint", "the one before it was rounded")
        raise UserError(f"{model.name}: is {what} of {model.precision} weights; leave --precision out, or plan {way_out}")
    other = 2 if engine and precision != "fp32" else FLOAT  # bytes of a number in the tower, in norms and in biases
    table = round(model.table * layouts.table.bytes_per_weight())
    return Weights(
        layers=round(model.matrices * layouts.matrices.bytes_per_weight(model.group) + model.vectors * other),
        embedding=table,
        head=0 if model.tied else table,
        tower=round(_tower_bytes(model.tower, other)),
    )


def _tower_bytes(tower: TowerGeometry, other: int) -> int:
    """Linears in one byte where the tower is in 8 bits; everything else in ``other`` bytes a number."""
    linears = tower.block_parameters + tower.projector_parameters if tower.precision == "int8" else 0
    return linears + other * (tower.parameters - linears)


def arena_bytes(model: PlannedModel, budget: int, kv: str) -> int:
    """A stream's cache of prefix + ``budget`` + text rows in every layer, as ``KVCache.bytes_for`` allocates it."""
    shape = (model.layers, model.kv_heads, model.head_dim, model.capacity(budget))
    return KVCache.bytes_for(*shape, inv_freq=np.ones(model.head_dim // 2), axes=model.axes, dtype=kv)


def policy_bytes(model: PlannedModel, budget: int) -> int:
    """The most that a policy keeps: POLICY_ROW for every row held."""
    return POLICY_ROW * model.layers * model.kv_heads * (model.prefix + budget)


def rows_at_once(model: PlannedModel, budget: int, chunk: int) -> int:
    """Rows of the largest call: ``chunk`` frames into an empty memory, up to the budget."""
    grids = max(1, chunk // model.tower.group)
    return max(model.tower.rows, min(grids * model.tower.rows, budget))


def calls_at_once(model: PlannedModel, budget: int, chunk: int) -> int:
    """The number of such calls that fill an empty memory."""
    return budget // rows_at_once(model, budget, chunk)


def activation_bytes(model: PlannedModel, rows: int, kind: str, repeated: bool = True) -> int:
    """Working memory of the decoder for calls of ``rows`` rows.

    Widths: I of the MLP, E of the stream, Q of a query and K of a key in all heads. On a CPU, float32: 6 I + 3 E + 3 Q + 4 K
    numbers a row, the MLP's product, halves, gate and activation beside attention's rows; ONNX Runtime serves ``repeated``
    calls from another block of 6 I + 3 E, and its arena keeps both. Inputs, E (1 + deepstack) a row, are held three times. On a
    GPU, float16, fused: 3 I + 4 E a row, and the inputs.
    """
    inner, width = model.inner, model.hidden
    entering = width * (1 + model.deepstack)
    if kind != "cpu":
        return 2 * rows * (3 * inner + 4 * width + entering)
    first = 6 * inner + 3 * width + model.head_dim * (3 * model.heads + 4 * model.kv_heads)
    again = 6 * inner + 3 * width if repeated else 0
    return FLOAT * rows * (first + again + 3 * entering)


def vision_bytes(model: PlannedModel, chunk: int, kind: str) -> int:
    """Working memory of ``chunk`` frames in the tower, with their pixels and features.

    N patches of width W, an MLP of width I. On a CPU, float32, all grids at once (one at a time in 8 bits): attention's 4 N W
    numbers a grid and the MLP's N (3 I + 2 W), both kept by the arena. On a GPU, float16, a grid at a time: N (I + 4 W). Pixels
    are float32 ``[chunk, 3, height, width]``, held twice.
    """
    tower = model.tower
    grids = max(1, chunk // tower.group)
    at_once = grids if tower.precision == "fp32" else 1
    pixels = 2 * FLOAT * grids * tower.group * 3 * tower.size[0] * tower.size[1]
    features = FLOAT * grids * tower.tokens * model.hidden * (1 + model.deepstack)
    if kind != "cpu":
        return pixels + features + 2 * tower.patches * (tower.inner + 4 * tower.width)
    return pixels + features + FLOAT * at_once * tower.patches * (3 * tower.inner + 6 * tower.width)


def present_bytes(model: PlannedModel, budget: int, kv: str) -> int:
    """The newest frame and the references for changes, float32 of E (1 + deepstack) a token, and that frame's cache rows."""
    features = FLOAT * model.tower.tokens * model.hidden * (1 + model.deepstack)
    rows = arena_bytes(model, budget + model.tower.rows, kv) - arena_bytes(model, budget, kv)
    return 2 * features + rows


def chunk_bytes(model: PlannedModel, chunk: int) -> int:
    """A stream's pixels ``[chunk, 3, height, width]`` and features of a chunk, float32."""
    tower = model.tower
    grids = max(1, chunk // tower.group)
    features = grids * tower.tokens * model.hidden * (1 + model.deepstack)
    return FLOAT * (grids * tower.group * 3 * tower.size[0] * tower.size[1] + features)


def snapshot_bytes(model: PlannedModel, budget: int, chunk: int, kv: str) -> int:
    """A snapshot's copy of prefix + ``budget`` rows and a chunk; and thumbnails."""
    row = 2 * model.head_dim * DTYPES[kv].itemsize + row_bytes(model.axes)
    return model.layers * (model.prefix + budget) * model.kv_heads * row + chunk_bytes(model, chunk) + THUMBNAILS


def camera_bytes(model: PlannedModel, budget: int, chunk: int, kv: str) -> int:
    """One more camera on a server: cache, policy, chunk and snapshot; no weights."""
    own = arena_bytes(model, budget, kv) + policy_bytes(model, budget) + chunk_bytes(model, chunk)
    return own + snapshot_bytes(model, budget, chunk, kv)


def tower_cache_bytes(tower: TowerGeometry) -> int:
    """Keys and values of every patch in each of B blocks and its output, float32: N W (2 B + 1)."""
    return FLOAT * tower.patches * tower.width * (2 * tower.blocks + 1)


def resident_weights(model: PlannedModel, weights: Weights, precision: str, kind: str) -> int:
    """Weights in memory while a stream runs.

    On a CPU matrices are packed for their kernels, float16 as float32, and a tied head is packed beside the embedding's file,
    of which only used rows are read. An engine has them as stored.
    """
    if kind != "cpu":
        return weights.total
    layouts, group = load_precision(precision).onnxruntime, model.group
    matrices = layouts.matrices.packed_bytes_per_weight(group) / layouts.matrices.bytes_per_weight(group)
    head = layouts.table.packed_bytes_per_weight() / layouts.table.bytes_per_weight()
    return round(matrices * weights.layers + head * (weights.head or weights.embedding)) + weights.tower


def export_peak(model: PlannedModel) -> int:
    """The memory that ``edgevlm export`` asks for, for a layer in float32."""
    return needed_memory(FLOAT * layer_matrices(model.hidden, model.heads, model.kv_heads, model.head_dim, model.inner))


def memory_of(
    model: PlannedModel, device: DeviceProfile, precision: str, kv: str, budget: int, chunk: int, served: int = 0
) -> PlannedMemory:
    """Account for a stream of ``budget`` vision tokens a layer that takes ``chunk`` frames at once.

    served: cameras of a server, a stream each; 0 for a run, which has one stream and no snapshots.
    """
    weights, kind, streams = weights_of(model, precision, device.kind), device.kind, max(1, served)
    return PlannedMemory(
        weights=resident_weights(model, weights, precision, kind),
        kv=streams * arena_bytes(model, budget, kv),
        policy=streams * policy_bytes(model, budget),
        activations=activation_bytes(model, rows_at_once(model, budget, chunk), kind, calls_at_once(model, budget, chunk) > 1),
        vision=vision_bytes(model, chunk, kind) + (streams - 1) * chunk_bytes(model, chunk),
        runtime=CPU_RUNTIME if kind == "cpu" else RUNTIME,
        snapshots=served * snapshot_bytes(model, budget, chunk, kv),
        export_peak=export_peak(model),
        build_peak=build_need(weights.total, 0).host if kind == "jetson" else 0,
        present=present_bytes(model, budget, kv),
        tower_cache=tower_cache_bytes(model.tower) if model.tower_cache is None else model.tower_cache,
    )
