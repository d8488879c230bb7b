"""Where a bundle's engines are kept: ``BUNDLE/engines/KEY/GRAPH-FINGERPRINT.plan``, each there whole or not at all.

An engine serves one GPU, TensorRT version and precision alone, which make its key; the fingerprint is of the graph, its weights
and how it was to be called. Beside each is a ``.json`` with its size and SHA-256, written before it takes its name.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgevlm.errors import UserError
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.cuda.driver import CudaDevice
from edgevlm.runtime.files import UNFINISHED, atomic_write, reason

FOLDER, PLAN, LOCK = "engines", ".plan", ".lock"


def engine_key(device: CudaDevice, tensorrt: str, bundle: Bundle) -> str:
    """Of a GPU, a TensorRT version and the bundle's precisions: ``orin-sm87-trt10.3.0-int4-kv-fp16-vision-fp32``."""
    name = re.sub(r"[^a-z0-9]+", "-", device.name.lower()).strip("-") or "gpu"
    major, minor = device.compute_capability
    decoder, vision = bundle.decoder, bundle.vision
    return f"{name}-sm{major}{minor}-trt{tensorrt}-{decoder.precision}-kv-{decoder.kv}-vision-{vision.precision}"


@dataclass(frozen=True, slots=True)
class Record:
    """An engine's file; ``about``: the ``capacity`` and ``probes`` that it was built for."""

    bytes: int
    sha256: str
    about: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EngineFolder:
    """The engines of one key."""

    folder: Path

    @classmethod
    def of(cls, bundle: Bundle, key: str) -> EngineFolder:
        return cls(bundle.path / FOLDER / key)

    def path(self, graph: str, fingerprint: str) -> Path:
        return self.folder / f"{graph}-{fingerprint}{PLAN}"

    def record(self, plan: Path) -> Record | None:
        """What was written of an engine that is there whole; None for one that is not."""
        try:
            record = Record(**json.loads(_about(plan).read_bytes()))
            is_ours = type(record.about["capacity"]) is int and isinstance(record.about["probes"], bool)
            return record if is_ours and plan.stat().st_size == record.bytes else None
        except (OSError, TypeError, LookupError, ValueError, RecursionError):
            return None

    def engines(self, graph: str) -> list[Path]:
        """The engines of a graph that are there whole, newest first."""
        found = [plan for plan in self.folder.glob(f"{graph}-*{PLAN}") if self.record(plan)]
        return sorted(found, key=lambda plan: plan.stat().st_mtime, reverse=True)

    def put(self, plan: Path, content: memoryview, about: dict[str, Any]) -> Record:
        """Write an engine, and remove others of its graph. Raises UserError where the disk does not take it."""
        record = Record(content.nbytes, hashlib.sha256(content).hexdigest(), about)
        try:
            for path, part in ((_about(plan), json.dumps(asdict(record), indent=2).encode()), (plan, content)):
                with atomic_write(path) as stream:
                    stream.write(part)
        except OSError as error:
            why = reason(error, self.folder)
            raise UserError(f"{plan}: cannot be written ({why}); make room and build again: finished engines stay") from None
        for other in self.folder.glob(f"{plan.name.rsplit('-', 1)[0]}-*{PLAN}"):
            if other != plan:
                other.unlink(missing_ok=True)
                _about(other).unlink(missing_ok=True)
        return record

    @contextmanager
    def alone(self) -> Iterator[None]:
        """For one build at a time; what a killed one left half written is removed. Raises UserError while another is on."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder / LOCK, os.O_CREAT | os.O_RDWR, 0o666)
        except OSError as error:
            why = f"engines cannot be kept there ({error.strerror}); copy the bundle to a folder of your own"
            raise UserError(f"{self.folder}: {why}") from None
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"{self.folder}: another process is building these engines; wait for it") from None
            for left in self.folder.glob(f"*{UNFINISHED}"):
                left.unlink(missing_ok=True)
            yield
        finally:
            os.close(handle)


def read_plan(plan: Path, record: Record) -> memoryview:
    """An engine's bytes, mapped; raises UserError for a file that is not what was written."""
    with plan.open("rb") as stream:
        content = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    if hashlib.sha256(content).hexdigest() != record.sha256:
        raise UserError(f"{plan}: is damaged (its SHA-256 does not match); build it again (edgevlm build BUNDLE --force)")
    return content


def _about(plan: Path) -> Path:
    return plan.with_suffix(".json")
