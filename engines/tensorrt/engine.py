"""The TensorRT backend, which runs the engines that ``edgevlm build`` built from a bundle for this GPU.

All calls share one CUDA stream and one set of memory blocks, so calls from several threads wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgevlm.engines.inputs import Embedding, check_buffers, check_probes, graph_of, grouped_pixels
from edgevlm.engines.tensorrt import api
from edgevlm.engines.tensorrt.build import EngineFolder, check_profile
from edgevlm.engines.tensorrt.decoder import TensorRTDecoder
from edgevlm.engines.tensorrt.jobs import BuildSettings, jobs_of, pieces
from edgevlm.errors import UserError
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.cuda.driver import Driver, open_driver
from edgevlm.runtime.engine import ChangedTower, Float32, Int64, KVBuffer, KVDevice, TowerBuffer
from edgevlm.runtime.graph_profiles import ONNXRUNTIME


class TensorRT:
    """Runs one bundle on a GPU. See :class:`edgevlm.runtime.engine.Engine`. KV buffers are in device memory."""

    kv_device: KVDevice = "cuda"
    by_layer = False
    export_hint = "edgevlm export {} --device NAME, a Jetson's, and on that device edgevlm build BUNDLE"

    def __init__(self, bundle: Bundle, *, threads: int | None = None, driver: Driver | None = None) -> None:
        """Load the engines. Raises UserError if the bundle has no engines for this GPU. ``threads``: has no effect."""
        check_profile(bundle)
        self.bundle = bundle
        self._workspace, log = api.Workspace(driver or open_driver()), api.Log()
        device, graph = self._workspace.driver.device, bundle.file(bundle.decoder.graphs["full"])
        folder = EngineFolder(bundle, device)
        if (record := folder.newest(graph.stem)) is None:
            raise UserError(
                f"{bundle.path}: has no engines for {device.name} and TensorRT {api.VERSION}; build them (edgevlm build "
                f"{bundle.path})"
            )
        self.settings = BuildSettings(record.about["capacity"], probes=record.about["probes"])
        vision, decoder = jobs_of(bundle, self.settings)
        self._embedding = Embedding(bundle)
        self._decoder = folder.load(decoder, log)
        self._vision = api.EngineCalls(self._workspace, folder.load(vision, log), 0)  # 0: the tower has only one kind of call

    @classmethod
    def takes(cls, bundle: Bundle) -> bool:
        """Return whether engines can be built from the bundle's graphs."""
        return bundle.profile != ONNXRUNTIME

    def capacity(self, rows: int) -> int:
        """Return the number of rows per layer that the engines were built for. Raises UserError if ``rows`` is more."""
        if rows > self.settings.capacity:
            raise UserError(
                f"this session needs {rows} rows per layer, but the engines were built for {self.settings.capacity}; use a "
                f"lower --budget, or rebuild the engines (edgevlm build {self.bundle.path} --budget N)"
            )
        return self.settings.capacity

    def encode(self, pixels: Float32) -> Float32:
        vision, width = self.bundle.vision, self.bundle.decoder.row_width
        grouped = grouped_pixels(vision, pixels)
        features = np.empty((len(grouped), vision.tokens_per_frame, width), np.float32)
        most = self._vision.most("pixel_values")[0]
        for piece in pieces(len(grouped), most):
            shape = features[piece].shape
            with self._workspace.lock:
                self._vision.call({"pixel_values": grouped[piece]}, {"features": shape})
                features[piece] = self._vision.fetch({"features": shape})["features"]
        return features

    def embed(self, token_ids: Int64) -> Float32:
        return self._embedding.rows(np.asarray(token_ids, np.int64).reshape(-1))

    def bind_tower(self, buffer: TowerBuffer) -> ChangedTower:
        """Raise UserError, because only onnxruntime-cpu can encode just the changed patches."""
        raise UserError("--encode changed requires --engine onnxruntime-cpu; use that engine or --encode all")

    def bind(self, buffers: Sequence[KVBuffer], probes: Sequence[int] = (), sparse: bool = False) -> TensorRTDecoder:
        """Return a decoder that appends to these buffers, one per layer, of :meth:`capacity` rows each.

        Raises UserError if ``sparse`` is set, or if ``probes`` are requested from an engine built without them.
        """
        check_probes(self.bundle.decoder, probes)
        check_buffers(self.bundle, buffers, self.bundle.decoder.kv)
        graph_of(self.bundle, "st-spattn" if sparse else "full")
        for layer, buffer in enumerate(buffers):
            if buffer.shape[2] != self.settings.capacity:
                raise UserError(
                    f"layer {layer} has {buffer.shape[2]} rows, but the engines were built for {self.settings.capacity}; "
                    f"rebuild them for this session's --budget (edgevlm build {self.bundle.path} --budget N)"
                )
        if probes and not self.settings.probes:
            raise UserError(
                "this policy requires attention probes, but the engines were built with --no-probes; choose a policy without "
                f"them, such as infinipot-v, or rebuild the engines with probes (edgevlm build {self.bundle.path})"
            )
        return TensorRTDecoder(self._workspace, self.bundle, self._decoder, buffers, probes)

    def release_memory(self, short: bool) -> None:
        """Do nothing, because calls need little working memory."""

    def close(self) -> None:
        """Release the engines. A decoder that is still in use keeps its engine until it is deleted."""
        for name in ("_vision", "_decoder", "_embedding"):
            self.__dict__.pop(name, None)
