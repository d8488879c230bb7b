"""From a bundle's graphs to engines: what is there and matches is left alone, the rest is built, one graph after the other."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass

from edgevlm.engines.tensorrt import api
from edgevlm.engines.tensorrt.jobs import BuildSettings, build_need, check_memory, jobs_of
from edgevlm.engines.tensorrt.store import EngineFolder, engine_key
from edgevlm.errors import UserError
from edgevlm.progress import Notify
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.cuda.driver import Driver
from edgevlm.runtime.graph_profiles import ONNXRUNTIME, TENSORRT_10_3, profile_for


@dataclass(frozen=True, slots=True)
class Made:
    """An engine after a build: its graph, file, bytes, and whether it was there already."""

    graph: str
    path: str
    bytes: int
    kept: bool


def check_profile(bundle: Bundle) -> None:
    """Raise UserError for a bundle whose graphs this TensorRT does not take."""
    if bundle.profile == ONNXRUNTIME:
        raise UserError(
            f"{bundle.path}: has graphs for ONNX Runtime; export the checkpoint for this device first (edgevlm export "
            "CHECKPOINT_DIR --device NAME --out DIR)"
        )
    if bundle.profile not in (TENSORRT_10_3, profile_for(api.VERSION)):
        wanted = bundle.profile.removeprefix("tensorrt-")
        raise UserError(
            f"{bundle.path}: has graphs for TensorRT {wanted} and newer, and {api.VERSION} is installed; export the checkpoint "
            "again with this device's --jetpack (edgevlm doctor names it)"
        )


def build_engines(bundle: Bundle, settings: BuildSettings, driver: Driver, notify: Notify) -> Iterator[Made]:
    """Build what is missing, each engine written as soon as it is made; yields one :class:`Made` a graph.

    notify: a line for each graph. ctrl-C ends the process at once, since TensorRT holds the main thread; engines that are
    finished stay. Raises UserError as :mod:`~edgevlm.engines.tensorrt.api` does, and for too little memory or disk.
    """
    check_profile(bundle)
    place = EngineFolder.of(bundle, engine_key(driver.device, api.VERSION, bundle))
    with place.alone():
        jobs = jobs_of(bundle, settings)
        for number, job in enumerate(jobs, 1):
            plan = place.path(job.graph, job.fingerprint)
            record = None if settings.force else place.record(plan)
            is_there = record is not None
            if record is None:
                check_memory(job.graph, build_need(job.weights, settings.workspace), driver)
                notify(f"building {job.graph}, engine {number} of {len(jobs)}: this takes minutes")
                before = signal.signal(signal.SIGINT, signal.SIG_DFL)
                try:
                    content = api.build(job, settings.workspace, api.Log())
                finally:
                    signal.signal(signal.SIGINT, before)
                record = place.put(plan, content, {"capacity": settings.capacity, "probes": settings.probes})
            yield Made(job.graph, str(plan), record.bytes, is_there)
