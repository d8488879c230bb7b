"""Run a bundle on the CPU. ONNX Runtime computes a decoder's dense parts, and our own kernel computes attention.

A call uses ``threads`` threads in total, by default one per physical core. Worker threads sleep after a call: otherwise ONNX
Runtime's threads would slow down our kernel, and the kernel's threads would slow down ONNX Runtime.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import onnxruntime as ort

from edgevlm.engines.devices.machine import Machine
from edgevlm.engines.inputs import (
    AGAIN,
    Embedding,
    changed_spec,
    check_buffers,
    check_graphs,
    first_sparse_layer,
    grouped_pixels,
    per_layer_files,
    read_graph,
)
from edgevlm.engines.onnx_file import FLOAT16, external_bytes, external_types, operators, with_input
from edgevlm.engines.onnxruntime_layers import (
    SHARED,
    OnnxRuntimeDecoder,
    OnnxRuntimeTower,
    attention_of,
    check_parts,
    share_arena,
)
from edgevlm.engines.row_parts import row_part
from edgevlm.engines.threads import default_threads
from edgevlm.engines.weights_memory import settle_weights
from edgevlm.errors import BundleError, NoThreads, UserError
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.engine import Decoder, Float32, Int64, KVBuffer, KVDevice, TowerBuffer
from edgevlm.runtime.graph_profiles import ONNXRUNTIME

WEIGHTS_IN = "session.model_external_initializers_file_folder_path"
MAX_THREADS = 256  # ONNX Runtime has no limit of its own


def has_vnni() -> bool:
    """Return whether the processor has VNNI, the instructions that add up 8-bit products in 32 bits."""
    flags = Machine().fields("proc/cpuinfo").get("flags", "").split()
    return not {"avx512_vnni", "avx_vnni"}.isdisjoint(flags)


class Calls:
    """The ONNX Runtime options that all calls of an engine share.

    Normally a session keeps the memory of its largest call. While the system is short of memory, each call frees what it used.
    """

    def __init__(self, shrunk: str = "cpu:0") -> None:
        self.options: Any = None
        self._giving_back = ort.RunOptions()
        self._giving_back.add_run_config_entry("memory.enable_memory_arena_shrinkage", shrunk)

    def release_memory(self, short: bool) -> None:
        self.options = self._giving_back if short else None


def session_options(threads: int) -> Any:
    """Return options for a session whose workers sleep after a call and whose 8-bit products do not overflow."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 4  # errors are raised, not logged
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # 100 us is enough to bridge the gap between two operators; longer spinning would take cores from other programs
    options.add_session_config_entry("session.intra_op.spin_duration_us", "100")
    # without VNNI, "0" adds up 8-bit products in 16 bits and overflows; "1" adds them up in 32 bits and is slower
    options.add_session_config_entry("session.x64quantprecision", "0" if has_vnni() else "1")
    return options


class OnnxRuntimeCpu:
    """Runs one bundle on the CPU. See :class:`edgevlm.runtime.engine.Engine`."""

    kv_device: KVDevice = "host"
    by_layer = True
    shrunk = "cpu:0"  # the arenas that :meth:`release_memory` shrinks
    providers: Sequence[Any] = ("CPUExecutionProvider",)

    def __init__(self, bundle: Bundle, *, threads: int | None = None) -> None:
        if threads is not None and not 1 <= threads <= MAX_THREADS:
            raise UserError(f"threads must be 1 to {MAX_THREADS}, not {threads}")
        if bundle.profile != ONNXRUNTIME:
            raise UserError(
                f"{bundle.path}: was exported for {bundle.profile}; build its engines (edgevlm build {bundle.path}) and use "
                "--engine tensorrt, or export the checkpoint with --device cpu"
            )
        check_graphs(bundle)
        self.bundle = bundle
        self.threads = threads or default_threads()
        self.calls = Calls(self.shrunk)
        self._embedding = Embedding(bundle)
        self._changed: Any = None  # the session that encodes changed patches, opened by the first :meth:`bind_tower`

    def _open(self, name: str, *, copies: bool = True) -> Any:
        copies = copies or self._stored[0]
        session = self._session_of(name, {}, copies=copies)
        if copies:
            settle_weights(self.bundle.path, self._read_in_place)
        return session

    def _session_of(self, name: str, entries: Mapping[str, str], *, copies: bool = True, model: bytes | None = None) -> Any:
        """Open an ONNX Runtime session for a graph. ``model``: the graph, by default the file's content. ``entries``: more
        options.

        ``copies``: whether the session copies the weights into a faster layout. Otherwise it reads the mapped file, which saves
        memory but slows down calls with few rows. MatMulNBits weights are always copied: all graphs of a bundle must round
        activations alike, and ONNX Runtime rounds activations only if it copies the weights.
        """
        options = session_options(self.threads)
        options.add_session_config_entry("session.disable_prepacking", "0" if copies else "1")
        # whole graphs fuse 8-bit matrices into MatMulNBits, which at accuracy level 0 does not round activations
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
        for key, value in entries.items():
            options.add_session_config_entry(key, value)
        if not copies and self._stored[1]:  # optimisation would turn float16 matrices into float32 in memory
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        path = self.bundle.file(name)
        try:
            return ort.InferenceSession(model or str(path), options, providers=self.providers, enable_fallback=0)
        except Exception as error:
            if NoThreads.is_in(error):
                raise NoThreads from None
            reason = str(error).splitlines()[0]
            raise BundleError(
                f"{path}: ONNX Runtime {ort.__version__} cannot load it ({reason}); check the disk or upgrade onnxruntime"
            ) from error

    @cached_property
    def _stored(self) -> tuple[bool, bool]:
        def kinds(graph: bytes) -> tuple[bool, bool]:
            return "MatMulNBits" in operators(graph), FLOAT16 in external_types(graph)

        return read_graph(self.bundle, self.bundle.decoder.graphs["full"], kinds)

    @classmethod
    def takes(cls, bundle: Bundle) -> bool:
        """Return whether the bundle was exported for ONNX Runtime on the CPU."""
        return bundle.profile == ONNXRUNTIME

    def encode(self, pixels: Float32) -> Float32:
        """Encode normalised frames ``[F, 3, H, W]`` to features ``[G, tokens_per_frame, row_width]``.

        An int8 tower from an older export encodes one group of frames per call, because it uses one scale for all rows of a
        call.
        """
        vision = self.bundle.vision
        grouped = grouped_pixels(vision, pixels)
        if not len(grouped):
            tokens = vision.for_frames(*grouped.shape[2:]).tokens_per_frame
            return np.zeros((0, tokens, self.bundle.decoder.row_width), np.float32)
        calls = np.split(grouped, len(grouped)) if self._rounds_calls else [grouped]
        features = [self._vision.run(["features"], {"pixel_values": call}, self.calls.options)[0] for call in calls]
        return np.concatenate(features) if len(features) > 1 else features[0]

    @cached_property
    def _rounds_calls(self) -> bool:
        return "DynamicQuantizeMatMul" in read_graph(self.bundle, self.bundle.vision.graph, operators)

    @cached_property
    def _vision(self) -> Any:
        return self._open(self.bundle.vision.graph)

    def capacity(self, rows: int) -> int:
        """Return ``rows``, because buffers may have any size."""
        return rows

    def embed(self, token_ids: Int64) -> Float32:
        """Return the embeddings of token ids, ``[N, hidden]``."""
        return self._embedding.rows(np.asarray(token_ids, np.int64).reshape(-1))

    def bind(self, buffers: Sequence[KVBuffer], probes: Sequence[int] = (), sparse: bool = False) -> Decoder:
        """Return a decoder that appends to these buffers, one per layer.

        The first call loads the graphs, which all decoders of this engine share.
        """
        spec = self.bundle.decoder
        is_fp32 = spec.kv == "fp16" and buffers[:1] and buffers[0].dtype == np.float32  # resumed from an older fp32 bundle
        check_buffers(self.bundle, buffers, "fp32" if is_fp32 else spec.kv)
        sparse_from = first_sparse_layer(self.bundle) if sparse else None
        return OnnxRuntimeDecoder(self._parts, self._row_parts, spec, buffers, probes, self.calls, sparse_from, self.threads)

    @cached_property
    def _parts(self) -> list[Any]:
        share_arena()
        parts = [self._part(index, file) for index, file in enumerate(per_layer_files(self.bundle))]
        try:
            check_parts(parts, self.bundle.decoder)
        except ValueError as error:
            raise BundleError(f"{self.bundle.path}: {error}; {AGAIN}") from None
        settle_weights(self.bundle.path, self._read_in_place)
        return parts

    @property
    def _read_in_place(self) -> Sequence[str]:
        if not any(self.__dict__.get("_row_parts", ())):
            return []
        return list(read_graph(self.bundle, per_layer_files(self.bundle)[-1], external_bytes))

    @cached_property
    def _row_parts(self) -> list[Any]:
        """Return the decoder's parts for the C++ extension, with None for each part that only ONNX Runtime computes.

        The extension computes int8 parts for single rows only. Calls with several rows run in ONNX Runtime, which then reads
        the weights from the file. This makes an int8 call for a whole frame 7 % slower.
        """
        return [
            read_graph(self.bundle, file, partial(row_part, self.bundle.path, index=index, spec=self.bundle.decoder))
            for index, file in enumerate(per_layer_files(self.bundle))
        ]

    def _part(self, index: int, file: str) -> Any:
        def made(model: bytes) -> bytes:  # per-layer graphs of bundles before format 5 contain attention: cut it off
            return with_input(model, attention_of(index - 1), f"query{index - 1}") if index else model

        model = read_graph(self.bundle, file, made)
        copies = self._row_parts[index] is None
        return self._session_of(file, SHARED | {WEIGHTS_IN: str(self.bundle.path)}, copies=copies, model=model)

    def bind_tower(self, buffer: TowerBuffer) -> OnnxRuntimeTower:
        """Return a tower that encodes one stream's changed patches. The first call loads the tower's graph."""
        spec = changed_spec(self.bundle, buffer)
        if self._changed is None:
            self._changed = self._open(spec.graph)
        return OnnxRuntimeTower(self._changed, self.bundle, spec, buffer, self.calls)

    def release_memory(self, short: bool) -> None:
        """Set whether to free working memory after each call, which makes calls slower."""
        self.calls.release_memory(short)

    def close(self) -> None:
        """Release the graphs. A decoder that is still in use keeps its graphs until it is deleted."""
        for name in ("_vision", "_parts", "_row_parts", "_changed", "_embedding"):
            self.__dict__.pop(name, None)
