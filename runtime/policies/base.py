"""What a policy is: it looks at the cache when rows are coming and says which rows stay."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgevlm.runtime.bundle import FADING
from edgevlm.runtime.stateful import Stateful

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache, Rows
    from edgevlm.runtime.calibration import Calibration

Float32 = NDArray[np.float32]
Bool = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a policy asks of the session beyond the cache.

    probe_layers: layers whose queries it wants after each vision append. guidance: texts, in order, of the forward it may ask
    for before a compression, and guidance_layers, which that forward reports on. raw_layers: instead of a forward, layers that
    project the raw embeddings of each text by itself as they are; the texts are asked for anew each time and may change.
    question_layers: layers whose queries of a question's rows it wants, to compress under the question. variant: the decoder
    graph to prefill with; ``cut``, to be asked in every layer what is attended to. features: whether it wants what the tower
    saw of each frame.
    """

    probe_layers: tuple[int, ...] = ()
    guidance: tuple[str, ...] = ()
    guidance_layers: tuple[int, ...] = ()
    raw_layers: tuple[int, ...] = ()
    question_layers: tuple[int, ...] = ()
    variant: str = "whole"
    features: bool = False


@dataclass(frozen=True, slots=True)
class StreamShape:
    """What a policy may know of the model: ``layers``, ``tokens_per_frame`` p, and ``prefix``, the rows never evicted.

    fading: the model family's own k and omega of HERMES. calibration: what was measured of the model, if it was.
    """

    layers: int
    tokens_per_frame: int
    prefix: int
    fading: tuple[str, str] = FADING
    calibration: Calibration | None = None


@dataclass(frozen=True, slots=True)
class Appended:
    """Vision rows just published: their ``seq`` ``[n]`` and ``position`` ``[n, axes]``, the same in every layer and head.

    queries: per probe layer the rotated queries of these rows, float32 ``[heads, n, head_dim]``. frame: the frame that each
    belongs to, ``[n]``. features: the mean of each frame's features, ``[frames, row_width]``, for those that need them.
    """

    seq: NDArray[np.int64]
    position: NDArray[np.int32]
    queries: Mapping[int, Float32]
    frame: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    features: Float32 | None = None


@dataclass(frozen=True, slots=True)
class NewRows:
    """Rows that a policy makes for one layer: key (rotated to ``rows.position``) and value, ``[kv_heads, n, head_dim]``."""

    key: Float32
    value: Float32
    rows: Rows


@dataclass(frozen=True, slots=True)
class Plan:
    """What a compression does: per layer a mask ``[kv_heads, n_l]`` of rows to keep (None: all), then rows to add."""

    keep: list[Bool | None]
    add: Mapping[int, NewRows] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Guidance:
    """What the guidance rows were in each guidance layer, all rotated.

    queries: ``[heads, rows, head_dim]``; keys: ``[kv_heads, rows, head_dim]``; rows: how many each of the texts has.
    """

    queries: Mapping[int, Float32]
    keys: Mapping[int, Float32]
    rows: tuple[int, ...]


Guide = Callable[[], Guidance]
"""Runs the guidance over the memory as it is and leaves no rows behind."""


class Policy(Stateful, ABC):
    """A policy with a vision budget |M| per layer.

    Subclasses are dataclasses whose fields are the settings, and write one method, :meth:`select`. ``compress_to`` is |C|:
    the rows a compression leaves. Those that score by attention take the queries they asked for in :meth:`after_append`.

    What a policy keeps from one call to the next, beside the cache, is declared in ``state_fields``: attributes that
    :meth:`attach` makes. Snapshots hold them, the budget at equal bytes is charged for their arrays, and ``policy_bytes``
    of the stats counts those; see :class:`~edgevlm.runtime.stateful.Stateful`.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    bounded: ClassVar[bool] = True
    retrieves: ClassVar[bool] = False  # needs host memory or a disk below the cache

    budget: int
    shape: StreamShape

    def attach(self, budget: int, shape: StreamShape) -> None:
        """Fix the budget |M| (vision tokens per layer) and the stream's shape, before the first row."""
        self.budget, self.shape = budget, shape

    @property
    def needs(self) -> Needs:
        """Known once attached."""
        return Needs()

    @property
    def basis(self) -> str:
        """Known once attached: whether what depends on the model was measured or is a preset; empty: nothing does."""
        return ""

    @property
    def layer_budgets(self) -> NDArray[np.int64]:
        """|M_l| of each layer, ``[layers]``; known once attached."""
        return np.full(self.shape.layers, self.budget, np.int64)

    @property
    def compress_to(self) -> int:
        """|C|, vision tokens per layer after a compression with nothing pressing."""
        return self.budget

    @property
    def room(self) -> int:
        """The most rows to append at once: what one compression makes free, and never less than a frame."""
        return max(self.budget - self.compress_to, self.shape.tokens_per_frame)

    @property
    def working_rows(self) -> int:
        """Rows of a layer, beside |M_l|, that are filled anew in each call; known once attached."""
        return 0

    def compacted(self) -> None:
        """Called when positions have been made dense: those below the prefix and ``working_rows`` more are left free."""

    @property
    def appends_first(self) -> bool:
        """Whether a chunk is appended whole before the memory is compressed, as the authors' programs do.

        Its arena holds a chunk more, :meth:`before_append` is asked for 0 rows after each append, and every compression
        re-indexes.
        """
        return False

    def before_append(self, cache: KVCache, rows: int, guide: Guide) -> Plan | None:
        """Say what stays so that ``rows`` more fit in |M_l| in every layer; None when nothing is due."""
        held, budgets = cache.lengths - self.shape.prefix, self.layer_budgets
        if not self.bounded or np.all(held + rows <= budgets):
            return None
        share = self.compress_to / self.budget
        targets = [max(0, min(tokens_of(share, int(budget)), int(budget) - rows)) for budget in budgets]
        if np.all(held <= targets):
            return None
        self.prepare(cache, guide)
        return Plan([self._choose(cache, layer, t) if held[layer] > t else None for layer, t in enumerate(targets)])

    def _choose(self, cache: KVCache, layer: int, target: int) -> Bool:
        """:meth:`select` beside the text of frames, which leaves a layer with the last token of its frame in any head."""
        text = frame_text(cache, layer)
        mask = self.select(cache, layer, max(0, target - int(text[0].sum())))
        return without_lone_text(cache, layer, mask | text) if text.any() else mask

    def prepare(self, cache: KVCache, guide: Guide) -> None:
        """Called once before the layers of a compression are selected."""

    def after_append(self, cache: KVCache, appended: Appended) -> None:
        """Called when vision rows have been published, with the queries of ``needs.probe_layers``."""

    def answered(self, question: str, answer: str) -> None:
        """Called when a question has been answered, whichever conversation it belongs to."""

    def under_question(self, cache: KVCache, queries: Mapping[int, Float32]) -> list[Bool | None]:
        """Say what stays under a question, whose rows are the last in the cache: per layer a mask ``[kv_heads, n_l]``, or None.

        Asked only of policies with ``needs.question_layers``. queries: of the question's rows in each of those, rotated,
        ``[heads, rows, head_dim]``. All rows of the question stay.
        """
        return [None] * self.shape.layers

    @property
    def keeps_first_frame(self) -> bool:
        """Whether frame 0 never leaves: later frames see it for good when they are prefilled with ST-SpAttn."""
        return self.needs.variant == "st-spattn"

    def protected(self, cache: KVCache, layer: int) -> Bool:
        """Rows that :meth:`select` keeps, ``[kv_heads, n_l]``: prefix and text, and frame 0 if :attr:`keeps_first_frame`.

        Rows of frame 0 count in |M|, and in the ``target`` of :meth:`select`.
        """
        from edgevlm.runtime.kinds import Kind

        kind = cache.kind(layer)
        mask: Bool = (kind == Kind.PREFIX) | (kind == Kind.TEXT)
        return mask | ((kind == Kind.VISION) & (cache.frame(layer) == 0)) if self.keeps_first_frame else mask

    @abstractmethod
    def select(self, cache: KVCache, layer: int, target: int) -> Bool:
        """Rows of ``layer`` to keep: a mask ``[kv_heads, n_l]`` with prefix, text and exactly ``target`` others per head."""


class SteadyTarget(Policy):
    """A policy whose |C| does not depend on the rows that come: ``target`` |M|, or less where a frame needs more room."""

    target: float

    def __post_init__(self) -> None:
        if not 0 < self.target <= 1:
            raise ValueError("target lies in (0, 1]")

    @property
    def compress_to(self) -> int:
        return max(0, min(tokens_of(self.target, self.budget), self.budget - self.shape.tokens_per_frame))


def frame_text(cache: KVCache, layer: int) -> Bool:
    """Text that stands around frames, ``[kv_heads, n_l]``; the same rows in every head."""
    from edgevlm.runtime.kinds import Kind

    mask: Bool = (cache.kind(layer) == Kind.TEXT) & (cache.frame(layer) >= 0)
    return mask


def without_lone_text(cache: KVCache, layer: int, keep: Bool) -> Bool:
    """``keep`` without the text of frames of which no head keeps a token."""
    from edgevlm.runtime.kinds import Kind

    frame, text = cache.frame(layer), frame_text(cache, layer)
    return keep & ~(text & ~np.isin(frame, frame[keep & (cache.kind(layer) == Kind.VISION)]))


def tokens_of(fraction: float, whole: int) -> int:
    """``floor(fraction * whole)`` that does not fall below an exact product by rounding (0.75 * 4 is 3)."""
    return math.floor(fraction * whole + 1e-9)


def newest(seq: NDArray[np.int64], among: Bool, count: int) -> Bool:
    """Per head the ``count`` newest rows by ``seq``: all arrays ``[kv_heads, n]``."""
    from edgevlm.runtime.kernels import top_k

    return top_k(np.zeros(seq.shape, np.float32), seq, among, count)


def parse_settings(text: str) -> tuple[str, dict[str, str]]:
    """Split ``name:key=value,key=value`` into the name and its settings."""
    name, _, rest = text.partition(":")
    pairs: Sequence[str] = [part for part in rest.split(",") if part]
    return name, {key.strip(): value.strip() for key, _, value in (pair.partition("=") for pair in pairs)}
