"""Build a bundle's missing or outdated engines from its graphs, one after another, and keep them in the bundle.

An engine is the file ``BUNDLE/engines/KEY/GRAPH-FINGERPRINT.plan``, which is written atomically. KEY names the GPU, the
TensorRT version and the engine's precisions. FINGERPRINT is a hash of the graph, its weights and the input shapes of its calls.
A ``.json`` file next to each engine, written first, has the engine's size and SHA-256.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgevlm.engines.tensorrt import api
from edgevlm.engines.tensorrt.jobs import BuildJob, BuildSettings, Record, build_need, check_memory, jobs_of, read_record
from edgevlm.errors import UserError
from edgevlm.progress import Notify
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.cuda.driver import CudaDevice, Driver
from edgevlm.runtime.files import UNFINISHED, atomic_write, reason
from edgevlm.runtime.graph_profiles import ONNXRUNTIME, TENSORRT_10_3, profile_for

FOLDER, PLAN = "engines", ".plan"


@dataclass(frozen=True, slots=True)
class Made:
    """The file and size of a built engine. ``kept``: whether the engine existed already."""

    graph: str
    path: str
    bytes: int
    kept: bool


def check_profile(bundle: Bundle) -> None:
    """Raise UserError if this TensorRT version cannot read the bundle's graphs."""
    if bundle.profile == ONNXRUNTIME:
        raise UserError(
            f"{bundle.path}: has graphs for ONNX Runtime; export the checkpoint for this device first (edgevlm export "
            "CHECKPOINT_DIR --device NAME --out DIR)"
        )
    if bundle.profile not in (TENSORRT_10_3, profile_for(api.VERSION)):
        wanted = bundle.profile.removeprefix("tensorrt-")
        raise UserError(
            f"{bundle.path}: requires TensorRT {wanted} or newer, but {api.VERSION} is installed; export the checkpoint "
            "again with this device's --jetpack (edgevlm doctor shows it)"
        )


def build_engines(bundle: Bundle, settings: BuildSettings, driver: Driver, notify: Notify) -> Iterator[Made]:
    """Build missing engines and save each as soon as it is built.

    Yields one result per graph. ``notify``: called with a line of text before each build. Ctrl-C ends the process at once,
    since TensorRT holds the main thread; finished engines stay. Raises UserError if there is too little memory or disk space,
    or if TensorRT fails.
    """
    check_profile(bundle)
    place = EngineFolder(bundle, driver.device)
    with place.alone():
        jobs = jobs_of(bundle, settings)
        for number, job in enumerate(jobs, 1):
            plan = place.path(job)
            record = None if settings.force else read_record(plan)
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


class EngineFolder:
    """A bundle's engines for a device, in a folder like ``orin-sm87-trt10.3.0-int4-kv-fp16-vision-fp32``."""

    def __init__(self, bundle: Bundle, device: CudaDevice) -> None:
        name, (major, minor) = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-") or "gpu", device.compute_capability
        kept = f"{bundle.decoder.precision}-kv-{bundle.decoder.kv}-vision-{bundle.vision.precision}"
        self.folder = bundle.path / FOLDER / f"{name}-sm{major}{minor}-trt{api.VERSION}-{kept}"

    def path(self, job: BuildJob) -> Path:
        return self.folder / f"{job.graph}-{job.fingerprint}{PLAN}"

    def newest(self, graph: str) -> Record | None:
        for plan in sorted(self.folder.glob(f"{graph}-*{PLAN}"), key=lambda plan: plan.stat().st_mtime, reverse=True):
            if record := read_record(plan):
                return record
        return None

    def load(self, job: BuildJob, log: api.Log) -> api.Loaded:
        """Load a graph's engine. Raises UserError if the engine is missing, damaged, or built from a different graph."""
        plan, again = self.path(job), f"build it (edgevlm build {self.folder.parents[1]})"
        if (record := read_record(plan)) is None:
            raise UserError(f"{plan}: is missing or was built from another graph; {again}")
        with plan.open("rb") as stream:
            content = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
        if hashlib.sha256(content).hexdigest() != record.sha256:
            raise UserError(f"{plan}: is damaged (its SHA-256 does not match); build it again (edgevlm build BUNDLE --force)")
        return api.Loaded(content, str(plan), log)

    def put(self, plan: Path, content: memoryview, about: dict[str, Any]) -> Record:
        """Write an engine and remove older engines of its graph. Raises UserError if the disk is full or read-only."""
        record = Record(content.nbytes, hashlib.sha256(content).hexdigest(), about)
        described = json.dumps(asdict(record), indent=2).encode()
        try:
            for path, part in ((plan.with_suffix(".json"), described), (plan, content)):
                with atomic_write(path) as stream:
                    stream.write(part)
        except OSError as error:
            why = reason(error, self.folder)
            advice = "free disk space and build again; finished engines are kept"
            raise UserError(f"{plan}: cannot be written ({why}); {advice}") from None
        for other in self.folder.glob(f"{plan.name.rsplit('-', 1)[0]}-*{PLAN}"):
            if other != plan:
                other.unlink(missing_ok=True)
                other.with_suffix(".json").unlink(missing_ok=True)
        return record

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the folder for this build and remove a killed build's unfinished files.

        Raises UserError if another build holds the lock.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder / ".lock", os.O_CREAT | os.O_RDWR, 0o666)
        except OSError as error:
            why = f"cannot be written ({error.strerror}); copy the bundle to a writable folder"
            raise UserError(f"{self.folder}: {why}") from None
        with os.fdopen(handle):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{self.folder}: another process is building engines there; wait until it finishes") from None
            for left in self.folder.glob(f"*{UNFINISHED}"):
                left.unlink(missing_ok=True)
            yield
