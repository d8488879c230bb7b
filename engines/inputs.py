"""Check inputs, group frames and embed tokens, for all backends."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

import numpy as np

from edgevlm.engines.onnx_file import external_tensors, operators, value_shapes
from edgevlm.errors import BundleError, CacheError, CacheFull, UserError
from edgevlm.runtime.bundle import Bundle, ChangedTowerSpec, DecoderSpec, VisionSpec
from edgevlm.runtime.engine import Float32, FramePattern, Int32, Int64, KVBuffer, TowerBuffer
from edgevlm.runtime.kv import DTYPES, KVType

HALF = 128  # the 8-bit code of the number 0 in an embedding
AGAIN = "export the checkpoint again (edgevlm export CHECKPOINT_DIR --out DIR)"

T = TypeVar("T")
Sizes = tuple[int | None, ...]  # None: any size


def check_graphs(bundle: Bundle) -> None:
    """Raise BundleError if the shapes in ONNX Runtime's graphs differ from those in the manifest."""
    spec, vision, changed = bundle.decoder, bundle.vision, bundle.vision.changed
    size = (None, None) if vision.pixels else vision.size
    wanted: dict[str, Sizes] = {
        "inputs_embeds": (1, None, spec.row_width),
        "cos": (1, None, spec.rotary),
        "logits": (1, None, spec.vocab),
    }
    for layer in range(spec.layers):
        kept: Sizes = (1, spec.kv_heads, None, spec.head_dim)
        wanted |= {f"key{layer}": kept, f"value{layer}": kept, f"query{layer}": (1, None, spec.heads * spec.head_dim)}
    _check_graph(bundle, spec.graphs["full"], wanted, {f"key{spec.layers}"})
    tokens = None if vision.pixels else vision.tokens_per_frame
    pixels: dict[str, Sizes] = {"pixel_values": (None, 3 * vision.group, *size), "features": (None, tokens, spec.row_width)}
    _check_graph(bundle, vision.graph, pixels)
    if changed is not None:
        kept = (1, changed.heads, changed.positions, changed.head_dim)
        towers: dict[str, Sizes] = {f"{part}{layer}": kept for layer in range(changed.layers) for part in ("key", "value")}
        shapes: dict[str, Sizes] = {"pixel_values": (1, 3 * vision.group, *vision.size), "features": (None, spec.row_width)}
        _check_graph(bundle, changed.graph, towers | shapes, {f"key{changed.layers}"})


def read_graph(bundle: Bundle, name: str, read: Callable[[bytes], T]) -> T:
    """Read and parse one of the bundle's graph files. Raises BundleError if the file cannot be read or parsed."""
    path = bundle.file(name)
    try:
        return read(path.read_bytes())
    except OSError as error:
        raise BundleError(f"{path}: cannot be read ({error.strerror or error}); check the disk") from None
    except ValueError as error:
        raise BundleError(f"{path}: cannot be read ({str(error)[:200]!r}); {AGAIN}") from None


def _check_graph(bundle: Bundle, name: str, wanted: Mapping[str, Sizes], absent: Collection[str] = ()) -> None:
    """Check one graph's shapes and weights. ``wanted``: the expected shapes, in which None allows any size."""
    path = bundle.file(name)
    found, weights = read_graph(bundle, name, lambda model: (value_shapes(model), external_tensors(model)))
    for tensor in weights:
        record = bundle.files.get(tensor.file)
        if record is None or not 0 <= tensor.offset <= tensor.offset + tensor.length <= record.bytes:
            raise BundleError(
                f"{path}: weights of {tensor.name[:80]!r} not found in the bundle ({tensor.file[:80]!r}); {AGAIN}"
            )
    for value, shape in wanted.items():
        own = found.get(value)
        fits = own is not None and len(own) == len(shape)
        if own is None or not fits or any(None not in (a, b) and a != b for a, b in zip(own, shape, strict=True)):
            actual = "is missing" if own is None else f"has shape {list(own)}"
            raise BundleError(f"{path}: {value} {actual}, but bundle.json specifies {list(shape)}; {AGAIN}")
    if more := sorted(set(absent) & set(found)):
        raise BundleError(f"{path}: unexpected {more[0]}, as bundle.json specifies fewer layers; {AGAIN}")


def grouped_pixels(vision: VisionSpec, pixels: Float32) -> Float32:
    """Group frames for a vision tower that merges several frames, repeating the last frame to fill its group.

    ``pixels``: ``[F, 3, H, W]``. The result is ``[G, group * 3, H, W]``. Raises ValueError unless the frames are float32 and
    the tower accepts their size.
    """
    wanted, size = (3, *vision.size), pixels.shape[2:]
    if len(size) == 2 and min(size) > 0:
        wanted = (3, *vision.for_frames(*size).size)
    if pixels.ndim != 4 or pixels.shape[1:] != wanted or pixels.dtype != np.float32:
        raise ValueError(f"pixels must be float32 [F, {', '.join(map(str, wanted))}], not {pixels.dtype} {pixels.shape}")
    if odd := -len(pixels) % vision.group:
        pixels = np.concatenate([pixels, np.repeat(pixels[-1:], odd, 0)])
    return pixels.reshape(-1, 3 * vision.group, *size)


def graph_of(bundle: Bundle, variant: str) -> str:
    """Return the file name of one of the bundle's decoder graphs. Raises UserError if the bundle does not have this variant."""
    graphs = bundle.decoder.graphs
    if variant not in graphs:
        there = dict.fromkeys("per-layer" if name.startswith("per-layer") else name for name in graphs)
        wanted = "per-layer" if variant.startswith("per-layer") else variant
        raise UserError(f"{bundle.path}: has no {wanted} decoder graph (it has {', '.join(there)}); {AGAIN}")
    return graphs[variant]


def per_layer_files(bundle: Bundle) -> list[str]:
    """Return the file names of the per-layer decoder graphs. Raises UserError if the bundle has no per-layer graphs."""
    return [graph_of(bundle, f"per-layer{index}") for index in range(bundle.decoder.layers + 1)]


def first_sparse_layer(bundle: Bundle) -> int:
    """Return the first layer with sparse attention in the ``st-spattn`` graph. Raises UserError if the bundle lacks it."""
    return read_graph(bundle, graph_of(bundle, "st-spattn"), operators)["GroupQueryAttention"]


def changed_spec(bundle: Bundle, buffer: TowerBuffer) -> ChangedTowerSpec:
    """Check a buffer for the tower's cache, and return the description of the graph that uses it.

    Raises UserError if the bundle lacks the graph for changed patches, and CacheError for a buffer of the wrong size.
    """
    if (spec := bundle.vision.changed) is None:
        raise UserError(f"{bundle.path}: has no graph for changed patches; use --encode all, or {AGAIN}")
    if buffer.size != spec.cache_bytes:
        raise CacheError(f"buffer must be {spec.cache_bytes} bytes, not {buffer.size}")
    return spec


def check_probes(spec: DecoderSpec, probes: Sequence[int]) -> None:
    """Raise ValueError if queries are requested from a layer that the decoder does not have."""
    if any(not 0 <= layer < spec.layers for layer in probes):
        raise ValueError(f"probes must be layers from 0 to {spec.layers - 1}, not {list(probes)}")


def check_step(
    spec: DecoderSpec, capacity: Int64, embeds: Float32, cos: Float32, sin: Float32, past_len: Int32, logit_rows: Sequence[int]
) -> None:
    """Raise CacheError for invalid arguments of a step, and CacheFull if the new rows do not fit."""
    rows = len(embeds)
    check_rows(spec, embeds, cos, sin, logit_rows)
    if past_len.shape != (spec.layers,) or int(past_len.min()) < 0:
        raise CacheError(f"past_len must be {spec.layers} non-negative lengths, not {past_len!r}")
    over = np.flatnonzero(past_len + np.int64(rows) > capacity)
    if over.size:
        held, most = int(past_len[over[0]]), int(capacity[over[0]])
        raise CacheFull(f"layer {over[0]} holds {held} of {most} rows; {rows} more do not fit")


def check_pattern(spec: DecoderSpec, rows: int, past_len: Int32, pattern: FramePattern | None, sparse: bool) -> None:
    """Raise CacheError if a pattern does not fit the call's rows, or if the decoder was not bound with ``sparse=True``."""
    if pattern is None:
        return
    if not sparse:
        raise CacheError("this decoder does not support patterns; bind it with sparse=True")
    (layers, heads, *patches) = pattern.previous.shape
    if (layers, heads) != (spec.layers, spec.kv_heads) or len(patches) != 1 or patches[0] < 1 or rows % patches[0]:
        wanted = f"[{spec.layers}, {spec.kv_heads}, p] for {rows} rows of whole frames"
        raise CacheError(f"previous must be {wanted}, not {list(pattern.previous.shape)}")
    if not 0 <= pattern.shared <= int(past_len.min()):
        raise CacheError(f"shared must be from 0 to {past_len.min()}, not {pattern.shared}")
    if np.any(pattern.previous >= past_len[:, None, None]) or int(pattern.previous.min()) < -1:
        raise CacheError("previous must hold slots of valid rows, or -1")


def check_rows(spec: DecoderSpec, embeds: Float32, cos: Float32, sin: Float32, logit_rows: Sequence[int]) -> None:
    """Raise CacheError if the inputs of a call do not have the decoder's sizes."""
    s, rows = spec, len(embeds)
    if embeds.shape not in ((rows, s.hidden), (rows, s.row_width)) or rows < 1:
        raise CacheError(f"embeds must be [S, {s.hidden}] with S at least 1, not {list(embeds.shape)}")
    if cos.shape != (rows, s.rotary) or sin.shape != cos.shape:
        raise CacheError(f"cos and sin must be [{rows}, {s.rotary}], not {list(cos.shape)}, {list(sin.shape)}")
    if any(not -rows <= row < rows for row in logit_rows):
        raise CacheError(f"logit_rows {list(logit_rows)} must index the {rows} rows of this call")


def check_buffers(bundle: Bundle, buffers: Sequence[KVBuffer], kv: KVType) -> None:
    """Raise CacheError unless each layer has one buffer of the right shape and type."""
    spec = bundle.decoder
    if len(buffers) != spec.layers:
        raise CacheError(f"the decoder has {spec.layers} layers; {len(buffers)} buffers were given")
    for layer, buffer in enumerate(buffers):
        batch, heads, capacity, dim = buffer.shape
        if (batch, heads, dim) != (1, spec.kv_heads, spec.head_dim) or capacity < 1:
            raise CacheError(
                f"layer {layer}: a buffer must be [1, {spec.kv_heads}, capacity, {spec.head_dim}], not {list(buffer.shape)}"
            )
        if np.dtype(buffer.dtype) != DTYPES[kv]:
            raise CacheError(f"layer {layer}: keys and values must be {DTYPES[kv]}, not {buffer.dtype}")
        if kv == "int8" and any(s is None or s.shape != (heads, dim) for s in (buffer.key_scale, buffer.value_scale)):
            raise CacheError(f"layer {layer}: int8 keys and values need scales [{heads}, {dim}]")


class Embedding:
    """A bundle's embedding table: float32, float16, or 8-bit codes with a scale for each block of a row."""

    def __init__(self, bundle: Bundle) -> None:
        spec = bundle.decoder
        self._hidden = spec.hidden
        self.scales = None
        if spec.embedding_scales is None:
            self.table = bundle.array(spec.embedding, (spec.vocab, spec.hidden), np.float32, np.float16)
            return
        self.table = bundle.array(spec.embedding, (spec.vocab, None, None), np.uint8)
        self.scales = bundle.array(spec.embedding_scales, self.table.shape[:2], np.float32)
        if math.prod(self.table.shape[1:]) < spec.hidden:
            raise BundleError(f"{bundle.file(spec.embedding)}: has fewer than {spec.hidden} numbers per token; {AGAIN}")

    def rows(self, ids: Int64) -> Float32:
        """Return the embeddings ``[N, hidden]`` of token ids ``[N]``. Raises ValueError for ids outside the vocabulary."""
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < len(self.table):
            raise ValueError(f"token ids must be in [0, {len(self.table)}), not {ids.min()} to {ids.max()}")
        found = np.asarray(self.table[ids], np.float32)
        if self.scales is None:
            return found
        blocks = (found - HALF) * self.scales[ids][..., None]
        return blocks.reshape(len(ids), -1)[:, : self._hidden]
