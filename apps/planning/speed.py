"""A device's speed by a roofline of arithmetic and memory traffic, its efficiencies stated, not fitted; and what fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from edgevlm.apps.planning.memory import PlannedMemory, memory_of, weights_of
from edgevlm.apps.planning.model import PlannedModel
from edgevlm.engines.devices import DeviceProfile
from edgevlm.export.precisions import load_precision
from edgevlm.runtime.changes import FULL_FRAME_ABOVE
from edgevlm.runtime.kv import DTYPES

BANDWIDTH_EFFICIENCY = 0.75
"""Fraction of memory bandwidth that kernels which stream weights reach. Chosen before any comparison."""
COMPUTE_EFFICIENCY = 0.5
"""Fraction of peak arithmetic that products of some hundred rows reach. Chosen before any comparison."""
QUESTION = 32  # rows of a question's text, the template's among them
COMPRESSION_READS = 4.0  # plain reads of a full cache that one compression takes
MOST_CAMERAS = 256  # that a server takes
TERMS = ("vision", "compute", "memory bandwidth")


@dataclass(frozen=True, slots=True)
class RooflineCall:
    """Seconds of arithmetic and of memory traffic, which overlap: a call takes the longer."""

    compute: float
    traffic: float

    @property
    def seconds(self) -> float:
        return max(self.compute, self.traffic)

    @property
    def term(self) -> str:
        """The longer of the two."""
        return "compute" if self.compute > self.traffic else "memory bandwidth"


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model at a precision on a device. kv: type of keys and values. served: cameras of a server; 0: a run of one."""

    model: PlannedModel
    device: DeviceProfile
    precision: str
    kv: str
    served: int = 0

    def memory(self, budget: int, chunk: int) -> PlannedMemory:
        """The memory of all cameras, each with ``budget`` vision tokens a layer."""
        return memory_of(self.model, self.device, self.precision, self.kv, budget, chunk, self.served)

    def keeps_up(self, budget: int, chunk: int, fps: float) -> bool:
        """Whether it keeps up with ``fps`` frames a second of every camera."""
        return speed_of(self, budget, chunk).prefill_fps >= max(1, self.served) * fps

    @property
    def rate(self) -> float:
        """Operations a second of matrix products.

        Integers of 4 or 8 bits are multiplied as float16 on a GPU; on a CPU as 8 bits (accuracy level 4), float16 as float32.
        """
        if self.device.kind == "cpu":
            found = self.device[
                "int8_tops" if load_precision(self.precision).onnxruntime.matrices.is_integer else "fp32_tflops"
            ]
        else:
            found = self.device["fp32_tflops" if self.precision == "fp32" else "fp16_tflops"]
        return 1e12 * float(found) * COMPUTE_EFFICIENCY

    @property
    def tower_rate(self) -> float:
        """The tower's rate: float16 on a GPU unless weights are float32; on a CPU that of its stored linears."""
        if self.device.kind == "cpu" and self.model.tower.precision == "int8":
            return 1e12 * float(self.device["int8_tops"]) * COMPUTE_EFFICIENCY
        plain = self.device.kind == "cpu" or self.precision == "fp32"
        return 1e12 * float(self.device["fp32_tflops" if plain else "fp16_tflops"]) * COMPUTE_EFFICIENCY

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return 1e9 * float(self.device["bandwidth_gb_s"]) * BANDWIDTH_EFFICIENCY

    def vision(self, changed: float = 1.0) -> RooflineCall:
        """One grid through the tower, or the fraction of its patches that ``changed``.

        Operations: 2 P_block N + 2 P_projector R + 4 B N A W, for N patches, R projected rows, B blocks of width W in which a
        patch sees A others. Bytes: the tower's weights once.
        """
        tower = self.model.tower
        attention = 4 * tower.blocks * tower.patches * tower.attended * tower.width
        matrices = 2 * (tower.block_parameters * tower.patches + tower.projector_parameters * tower.projected)
        weights = weights_of(self.model, self.precision, self.device.kind).tower
        return RooflineCall(changed * (matrices + attention) / self.tower_rate, weights / self.bandwidth)

    def prefill(self, rows: int, held: int, calls: float = 1.0, logits: bool = False) -> RooflineCall:
        """``rows`` rows after ``held`` in ``calls`` calls of the decoder.

        Operations: 2 P rows for P parameters of the layers' matrices, 4 L H D rows (held + rows / 2) of attention, and 2 V E of
        a row's logits. Bytes: the layers' weights and the rows held, once a call; the head's with logits.
        """
        model, weights = self.model, weights_of(self.model, self.precision, self.device.kind)
        seen = held + rows / 2
        operations = 2 * model.matrices * rows + 4 * model.layers * model.heads * model.head_dim * rows * seen
        read = calls * (weights.layers + self.kv_bytes(held))
        if logits:
            operations += 2 * model.table
            read += weights.head or weights.embedding
        return RooflineCall(operations / self.rate, read / self.bandwidth)

    def kv_bytes(self, rows: int) -> float:
        """Keys and values of ``rows`` rows in every layer, bytes."""
        return 2 * self.model.layers * self.model.kv_heads * self.model.head_dim * rows * DTYPES[self.kv].itemsize

    def token(self, held: int) -> RooflineCall:
        """One token of an answer with ``held`` rows in the cache."""
        return self.prefill(1, held, logits=True)


@dataclass(frozen=True, slots=True)
class Speed:
    """A stream's speed at a budget.

    j_per_frame: an upper bound, the device's largest power budget times a frame's time; None if unknown. bound_by: the term of
    :data:`TERMS` that takes most of a frame's time.
    """

    prefill_fps: float
    ttft_ms: float
    tokens_per_s: float
    j_per_frame: float | None
    bound_by: str
    vision_ms: float
    prefill_ms: float
    compression_ms: float


def speed_of(roofline: Roofline, budget: int, chunk: int, changed: float = 1.0) -> Speed:
    """The speed once ``budget`` vision tokens are held in every layer and ``chunk`` frames are appended at once.

    A frame takes 1 / group of a grid: the tower, its rows through the decoder, and its share of a compression, which reads the
    cache COMPRESSION_READS times a chunk. changed: the fraction of patches encoded and tokens appended; above FULL_FRAME_ABOVE
    all patches are encoded.
    """
    model = roofline.model
    tower, held = model.tower, model.prefix + budget
    grids = max(1, chunk // tower.group)
    rows = max(1, round(changed * tower.tokens)) + tower.text
    vision = roofline.vision(1.0 if changed > FULL_FRAME_ABOVE else changed)
    prefill = roofline.prefill(rows, held, calls=1 / grids)
    compression = changed * COMPRESSION_READS * roofline.kv_bytes(held) / roofline.bandwidth / grids
    frame = (vision.seconds + prefill.seconds + compression) / tower.group
    seconds_of = {"vision": vision.seconds, prefill.term: prefill.seconds}
    seconds_of["memory bandwidth"] = seconds_of.get("memory bandwidth", 0.0) + compression
    watts = roofline.device["max_watts"]
    question = roofline.prefill(QUESTION, held, logits=True).seconds
    return Speed(
        prefill_fps=1 / frame,
        ttft_ms=1e3 * question,
        tokens_per_s=1 / roofline.token(held + QUESTION).seconds,
        j_per_frame=None if watts is None else float(watts) * frame,
        bound_by=max(TERMS, key=lambda term: seconds_of.get(term, 0.0)),
        vision_ms=1e3 * vision.seconds / tower.group,
        prefill_ms=1e3 * prefill.seconds / tower.group,
        compression_ms=1e3 * compression / tower.group,
    )


def fits(roofline: Roofline, memory: PlannedMemory) -> bool:
    """Whether it fits beside the system."""
    return memory.total <= roofline.device.usable_bytes


def can_run(roofline: Roofline, budget: int, chunk: int, fps: float) -> bool:
    """Whether a budget fits memory and positions, and keeps up with ``fps`` frames a second."""
    if not roofline.model.least_budget <= budget <= roofline.model.most_budget:
        return False
    return fits(roofline, roofline.memory(budget, chunk)) and roofline.keeps_up(budget, chunk, fps)


def largest(least: int, most: int, holds: Callable[[int], bool]) -> int:
    """The largest integer from ``least`` to ``most`` for which ``holds``, true up to some number; 0 if there is none."""
    if most < least or not holds(least):
        return 0
    low, high = least, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def largest_budget(roofline: Roofline, chunk: int, fps: float) -> int:
    """The largest budget that can run at ``fps``; 0 if none can."""
    model = roofline.model
    return largest(model.least_budget, model.most_budget, lambda budget: can_run(roofline, budget, chunk, fps))


def most_cameras(roofline: Roofline, budget: int, chunk: int, fps: float) -> int:
    """The most cameras of that budget that a server can watch at ``fps``; 0 if none."""
    return largest(1, MOST_CAMERAS, lambda cameras: can_run(replace(roofline, served=cameras), budget, chunk, fps))


def bound_by(roofline: Roofline, memory: PlannedMemory, speed: Speed) -> str:
    """``memory size`` if it does not fit, else the term that takes most of a frame's time."""
    return speed.bound_by if fits(roofline, memory) else "memory size"
