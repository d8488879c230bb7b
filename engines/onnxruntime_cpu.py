"""ONNX Runtime on the CPU: it computes the dense parts of a decoder, and our own kernel attends between them.

A call uses ``threads`` threads in total (by default the physical cores). Workers spin briefly for work during a call and sleep
after it, so that sessions and the kernel, which never run at once in one stream, do not slow each other.
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
MAX_THREADS = 256  # ONNX Runtime starts as many as it is given, for each graph


def has_vnni() -> bool:
    """Return whether the processor, as Linux describes it, adds up products of 8-bit numbers in 32 bits."""
    flags = Machine().fields("proc/cpuinfo").get("flags", "").split()
    return not {"avx512_vnni", "avx_vnni"}.isdisjoint(flags)


class Calls:
    """Options for each ONNX Runtime call, the same for all sessions of an engine.

    A session's arena keeps the memory of its largest call. With ``short`` each call frees unused memory.
    """

    def __init__(self, shrunk: str = "cpu:0") -> None:
        self.options: Any = None
        self._giving_back = ort.RunOptions()
        self._giving_back.add_run_config_entry("memory.enable_memory_arena_shrinkage", shrunk)

    def release_memory(self, short: bool) -> None:
        self.options = self._giving_back if short else None


def session_options(threads: int) -> Any:
    """Return options of a session whose workers stop spinning after a call and whose 8-bit products do not overflow."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 4  # errors are raised
    options.add_session_config_entry("session.force_spinning_stop", "1")
    # enough to go from one operator to the next; longer takes the cores from other programs and other sessions' workers
    options.add_session_config_entry("session.intra_op.spin_duration_us", "100")
    # without VNNI 8-bit products are added up in 16 bits, which overflow; "1" adds in 32, and is slower
    options.add_session_config_entry("session.x64quantprecision", "0" if has_vnni() else "1")
    return options


class OnnxRuntimeCpu:
    """One bundle loaded on the CPU; see :class:`edgevlm.runtime.engine.Engine`."""

    kv_device: KVDevice = "host"
    by_layer = True
    shrunk = "cpu:0"  # the arenas that :meth:`release_memory` is about
    providers: Sequence[Any] = ("CPUExecutionProvider",)

    def __init__(self, bundle: Bundle, *, threads: int | None = None) -> None:
        if threads is not None and not 1 <= threads <= MAX_THREADS:
            raise UserError(f"threads must be 1 to {MAX_THREADS}, not {threads}")
        if bundle.profile != ONNXRUNTIME:
            raise UserError(
                f"{bundle.path}: is for {bundle.profile}; build its engines (edgevlm build {bundle.path}) and give "
                "--engine tensorrt, or export the checkpoint with --device cpu"
            )
        check_graphs(bundle)
        self.bundle = bundle
        self.threads = threads or default_threads()
        self.calls = Calls(self.shrunk)
        self._embedding = Embedding(bundle)
        self._changed: Any = None  # the session of changed patches, opened when first bound

    def _open(self, name: str, *, copies: bool = True) -> Any:
        copies = copies or self._stored[0]
        session = self._session_of(name, {}, copies=copies)
        if copies:
            settle_weights(self.bundle.path, self._read_in_place)
        return session

    def _session_of(self, name: str, entries: Mapping[str, str], *, copies: bool = True, model: bytes | None = None) -> Any:
        """Return a session of one graph, from its file or ``model``, with further configuration entries.

        With ``copies`` it holds its own copies of the matrices in the kernels' layout. Without, it reads them from the mapped
        file, whose pages all sessions and processes share and the system can drop; a call of few rows is slower. Matrices that
        it multiplies in blocks are always copied: ONNX Runtime does not round activations for unpacked ones, so two graphs of
        one bundle would compute differently.
        """
        options = session_options(self.threads)
        options.add_session_config_entry("session.disable_prepacking", "0" if copies else "1")
        # a matrix of 8 bits in a whole graph is fused with its product, which then rounds no rows
        options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0")
        for key, value in entries.items():
            options.add_session_config_entry(key, value)
        if not copies and self._stored[1]:  # else float16 matrices become float32 in memory
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        path = self.bundle.file(name)
        try:
            return ort.InferenceSession(model or str(path), options, providers=self.providers, enable_fallback=0)
        except Exception as error:
            if NoThreads.is_in(error):
                raise NoThreads from None
            reason = str(error).splitlines()[0]
            raise BundleError(
                f"{path}: ONNX Runtime {ort.__version__} cannot load it ({reason}); check the disk, or upgrade onnxruntime"
            ) from error

    @cached_property
    def _stored(self) -> tuple[bool, bool]:
        def kinds(graph: bytes) -> tuple[bool, bool]:
            return "MatMulNBits" in operators(graph), FLOAT16 in external_types(graph)

        return read_graph(self.bundle, self.bundle.decoder.graphs["full"], kinds)

    @classmethod
    def takes(cls, bundle: Bundle) -> bool:
        """Return whether a bundle's graphs are of this engine's profile."""
        return bundle.profile == ONNXRUNTIME

    def encode(self, pixels: Float32) -> Float32:
        """Encode normalised frames ``[F, 3, H, W]`` to features ``[G, tokens_per_frame, row_width]``; see the protocol.

        int8 towers of earlier exports round all rows of a call with one scale. They take one group per call, so that a frame's
        features do not depend on other frames.
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
        """Return ``rows``: any number of rows can be bound."""
        return rows

    def embed(self, token_ids: Int64) -> Float32:
        """Gather the embeddings ``[N, hidden]`` of token ids ``[N]`` from the mapped file."""
        return self._embedding.rows(np.asarray(token_ids, np.int64).reshape(-1))

    def bind(self, buffers: Sequence[KVBuffer], probes: Sequence[int] = (), sparse: bool = False) -> Decoder:
        """Return a decoder bound to one buffer per layer, which also returns the queries of the layers in ``probes``; see the
        protocol.

        Its sessions are opened by the first call; they hold the matrices once.
        """
        spec = self.bundle.decoder
        is_fp32 = spec.kv == "fp16" and buffers[:1] and buffers[0].dtype == np.float32  # of a stream older than its bundle
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
        """The files of weights that the extension reads, once the decoder is open."""
        if not any(self.__dict__.get("_row_parts", ())):
            return []
        return list(read_graph(self.bundle, per_layer_files(self.bundle)[-1], external_bytes))

    @cached_property
    def _row_parts(self) -> list[Any]:
        """Return the parts that the extension computes, in int8 for single rows; None if ONNX Runtime's are used.

        They read the weights from the file. ONNX Runtime's parts then hold no copy either, and a frame's call in int8 takes 7 %
        longer.
        """
        return [
            read_graph(self.bundle, file, partial(row_part, self.bundle.path, index=index, spec=self.bundle.decoder))
            for index, file in enumerate(per_layer_files(self.bundle))
        ]

    def _part(self, index: int, file: str) -> Any:
        def made(model: bytes) -> bytes:  # in bundles before format 5 these graphs attend
            return with_input(model, attention_of(index - 1), f"query{index - 1}") if index else model

        model = read_graph(self.bundle, file, made)
        copies = self._row_parts[index] is None
        return self._session_of(file, SHARED | {WEIGHTS_IN: str(self.bundle.path)}, copies=copies, model=model)

    def bind_tower(self, buffer: TowerBuffer) -> OnnxRuntimeTower:
        """Return the tower bound to one stream's tower cache; its graph is opened on first use."""
        spec = changed_spec(self.bundle, buffer)
        if self._changed is None:
            self._changed = self._open(spec.graph)
        return OnnxRuntimeTower(self._changed, self.bundle, spec, buffer, self.calls)

    def release_memory(self, short: bool) -> None:
        """Free working memory after each call, which is slower, while memory is short."""
        self.calls.release_memory(short)

    def close(self) -> None:
        """Release the sessions; bound decoders keep theirs until they are dropped."""
        for name in ("_vision", "_parts", "_row_parts", "_changed", "_embedding"):
            self.__dict__.pop(name, None)
