"""From a bundle's graphs to engines: what is there and matches is left alone, the rest is built, one graph after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

from edgevlm.engines.tensorrt import api
from edgevlm.engines.tensorrt.jobs import BuildJob, BuildSettings, build_need, check_memory, jobs_of
from edgevlm.engines.tensorrt.store import EngineFolder, Record, engine_key
from edgevlm.errors import UserError
from edgevlm.progress import Notify
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.cuda.driver import Driver
from edgevlm.runtime.graph_profiles import ONNXRUNTIME, TENSORRT_10_3, profile_for

POLL_S = 0.1  # between looks at whether a build was interrupted


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


def build_engines(bundle: Bundle, settings: BuildSettings, driver: Driver, notify: Notify, progress: Notify) -> Iterator[Made]:
    """Build what is missing, each engine written as soon as it is made; yields one :class:`Made` a graph.

    notify: a line for each graph; progress: how far TensorRT has come with it. An interrupt stops TensorRT at its next step and
    is raised then. Raises UserError as :mod:`~edgevlm.engines.tensorrt.api` does, and for too little memory or disk.
    """
    check_profile(bundle)
    place = EngineFolder.of(bundle, engine_key(driver.device, api.VERSION, bundle))
    with place.alone():
        jobs = jobs_of(bundle, settings)
        for number, job in enumerate(jobs, 1):
            plan = place.path(job.graph, job.fingerprint)
            there = None if settings.force else place.record(plan)
            if there:
                notify(f"{job.graph}: its engine is there")
            else:
                check_memory(job.graph, build_need(job.weights, settings.workspace), driver)
                notify(f"building {job.graph}, engine {number} of {len(jobs)}: this takes minutes")
            record = there or _build(job, settings, place, progress)
            yield Made(job.graph, str(plan), record.bytes, there is not None)


def _build(job: BuildJob, settings: BuildSettings, place: EngineFolder, progress: Notify) -> Record:
    built = _interruptible(job, settings, place.timings(), progress)
    about = {"tensorrt": api.VERSION, "capacity": settings.capacity, "probes": settings.probes}
    record = place.put(place.path(job.graph, job.fingerprint), built.plan, about)
    place.put_timings(built.cache)
    return record


def _interruptible(job: BuildJob, settings: BuildSettings, cache: bytes, progress: Notify) -> api.Built:
    """Build in a thread of its own, so that an interrupt is seen while TensorRT works; it then stops at its next step."""
    log, monitor = api.Log(), api.Monitor(lambda step: progress(f"building {job.graph}: {step}"))
    recipe = api.Recipe(job.model, job.path, job.calls, job.dropped, settings.workspace, cache)
    outcome: list[api.Built | BaseException] = []
    done = threading.Event()

    def work() -> None:
        try:
            outcome.append(api.build(recipe, monitor, log))
        except BaseException as error:
            outcome.append(error)
        done.set()

    threading.Thread(target=work, name="tensorrt-build").start()
    while not done.is_set():  # not a join: one that is interrupted takes the thread for ended
        try:
            done.wait(POLL_S)
        except KeyboardInterrupt:
            monitor.cancelled.set()
            progress(f"stopping {job.graph} at TensorRT's next step; the same command goes on from here")
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]
