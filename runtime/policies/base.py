"""What a policy is: it looks at the cache when rows are coming and says which rows stay."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.runtime import kernels
from edgevlm.runtime.bundle import FADING
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.plugins import split_options
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
    for before a compression, and guidance_layers, which that forward reports on. variant: the decoder graph to prefill with;
    ``per-layer``, to be asked in every layer what is attended to. features: whether it wants what the tower saw of each frame.
    """

    probe_layers: tuple[int, ...] = ()
    guidance: tuple[str, ...] = ()
    guidance_layers: tuple[int, ...] = ()
    variant: str = "full"
    features: bool = False


@dataclass(frozen=True, slots=True)
class StreamShape:
    """What a policy may know of the model: ``layers``, ``tokens_per_frame`` p, and ``prefix``, the rows never evicted.

    fading: the model family's own k and omega of HERMES. calibration: what was measured of the model, if it was. thinned:
    whether frames enter with what changed alone, one token or more of the p. text_per_frame: the most rows of text around one.
    """

    layers: int
    tokens_per_frame: int
    prefix: int
    fading: tuple[str, str] = FADING
    calibration: Calibration | None = None
    thinned: bool = False
    text_per_frame: int = 0


@dataclass(frozen=True, slots=True)
class Appended:
    """Vision rows just committed: their ``seq`` ``[n]`` and ``position`` ``[n, axes]``, the same in every layer and head.

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


@dataclass(frozen=True, slots=True)
class Context:
    """What a compression is for. rows: about to be appended. guide: runs the guidance texts of ``needs`` over the memory as it
    is, and leaves no rows behind."""

    rows: int
    guide: Guide


Guide = Callable[[], Guidance]


class Policy(Stateful):
    """Decides which rows of the cache stay, within a budget |M| of vision tokens per layer.

    A subclass is a dataclass whose fields are its settings (:func:`setting`), and writes one method::

        @dataclass
        class SmallKeys(Policy):
            def score(self, cache, layer):
                return -np.linalg.norm(cache.dequantize("key", layer), axis=-1)

    The base keeps the prefix, text and, where later frames see it for good, frame 0, and of the other rows those of the highest
    score. A policy that decides over all layers at once overrides :meth:`compress` instead. One that ranks by attention names
    the layers whose queries it wants in :attr:`needs` and takes them in :meth:`after_append`.

    What it keeps from one call to the next, beside the cache, is made in :meth:`attach` and declared in ``state_fields``.
    Snapshots store those attributes, equal bytes are charged for their arrays, and ``policy_bytes`` of the stats counts them;
    see :class:`~edgevlm.runtime.stateful.Stateful`.
    """

    name: ClassVar[str]  # as on the command line; the class's own name unless given
    paper: ClassVar[str] = ""
    bounded: ClassVar[bool] = True

    budget: int
    shape: StreamShape

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        written = any(getattr(cls, name) is not getattr(Policy, name) for name in ("score", "compress", "before_append"))
        if cls.bounded and not written:
            raise TypeError(f"{cls.__name__} defines neither score() nor compress()")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Raises ValueError for a setting outside its range."""
        for name, problem in ((each.name, out_of_range(each, getattr(self, each.name))) for each in setting_fields(type(self))):
            if problem:
                raise ValueError(f"{name} {problem}")

    def attach(self, budget: int, shape: StreamShape) -> None:
        """Fix the budget |M| (vision tokens per layer) and the stream's shape, before the first row."""
        self.budget, self.shape = budget, shape

    @property
    def needs(self) -> Needs:
        """Known once attached."""
        return Needs()

    @property
    def basis(self) -> str:
        """Return whether what depends on the model was measured or is a preset; empty: nothing does. Known once attached."""
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
    def max_append(self) -> int:
        """The most rows to append at once: the headroom that one compression makes, and never less than a frame."""
        return max(self.budget - self.compress_to, self.shape.tokens_per_frame)

    @property
    def working_rows(self) -> int:
        """Rows of a layer, beside |M_l|, that are filled anew in each call; known once attached."""
        return 0

    def compacted(self) -> None:
        """Called when positions have been made dense: those below the prefix and ``working_rows`` more are left free."""

    @property
    def needs_whole_frames(self) -> bool:
        """Whether frames must be appended whole, so that ``--append changed`` is refused; known before it is attached."""
        return False

    @property
    def takes_single_frames(self) -> bool:
        """Return whether what changed in a frame must be appended by itself, though what changed in several would fit."""
        return False

    @property
    def keeps_whole_frames(self) -> bool:
        """Return whether targets are rounded down to whole frames."""
        return False

    def score(self, cache: KVCache, layer: int) -> NDArray[np.floating]:
        """How much each row of ``layer`` matters, ``[kv_heads, n]``: the highest stay, of equal ones the newer."""
        raise NotImplementedError

    def compress(self, cache: KVCache, targets: Mapping[int, int], context: Context) -> Mapping[int, Bool]:
        """Choose in all layers that are too full, in one call; by :meth:`score` unless overridden.

        targets: layer -> how many vision rows (and summaries) to keep per KV head, those of a protected frame 0 among them.
        Returns layer -> mask ``[kv_heads, n_l]``. Prefix and text stay whatever it says of them.
        """
        return {layer: self.keep_top(cache, layer, self.score(cache, layer), target) for layer, target in targets.items()}

    def summaries(self, cache: KVCache, keep: Mapping[int, Bool], rows: int) -> Mapping[int, NewRows]:
        """Rows to append once ``keep`` is done, by layer, before the ``rows`` that come; they count in the layer's target."""
        return {}

    def before_append(self, cache: KVCache, rows: int, guide: Guide) -> Plan | None:
        """Say what stays so that ``rows`` more fit in |M_l| in every layer; None when nothing is due.

        Raises UserError for a policy that keeps more or fewer rows than it was asked to.
        """
        held, budgets = cache.lengths - self.shape.prefix, self.layer_budgets
        if not self.bounded or np.all(held + rows <= budgets):
            return None
        fraction = self.compress_to / self.budget
        wanted = [max(0, min(tokens_of(fraction, int(budget)), int(budget) - rows)) for budget in budgets]
        due = [layer for layer, target in enumerate(wanted) if held[layer] > target]
        if not due:
            return None
        text = {layer: frame_text(cache, layer) for layer in due}
        targets = {layer: max(0, wanted[layer] - np.count_nonzero(text[layer][0])) for layer in due}
        if self.keeps_whole_frames:
            targets = {layer: target - target % self.shape.tokens_per_frame for layer, target in targets.items()}
        chosen, keep = self.compress(cache, targets, Context(rows, guide)), {}
        if not isinstance(chosen, Mapping):
            raise UserError(f"policy {self.name}: compress() gave a {type(chosen).__name__}, not masks by layer")
        for layer in due:
            mask = self._with_fixed(cache, layer, chosen.get(layer))
            keep[layer] = without_lone_text(cache, layer, mask) if text[layer].any() else mask
        add = self.summaries(cache, keep, rows)
        for layer, target in targets.items():
            self._check_kept(cache, layer, keep[layer], max(0, target - (len(add[layer].rows) if layer in add else 0)))
        return Plan([keep.get(layer) for layer in range(len(budgets))], add)

    def _with_fixed(self, cache: KVCache, layer: int, mask: Bool | None) -> Bool:
        """``mask`` with prefix and text. Raises UserError for what is no mask of the layer."""
        kind = cache.kind(layer)
        if mask is None or mask.shape != kind.shape or mask.dtype != np.bool_:
            what = "nothing" if mask is None else f"{mask.dtype} {list(mask.shape)}"
            raise UserError(f"policy {self.name}: compress() gave {what} for layer {layer}, not a mask {list(kind.shape)}")
        return mask | (kind == Kind.PREFIX) | (kind == Kind.TEXT)

    def _check_kept(self, cache: KVCache, layer: int, keep: Bool, target: int) -> None:
        kept = [np.count_nonzero(head) for head in keep & counted(cache.kind(layer))]
        if any(rows != target for rows in kept):
            head = next(head for head, rows in enumerate(kept) if rows != target)
            raise UserError(
                f"policy {self.name} keeps too {'few' if kept[head] < target else 'many'} rows: {kept[head]} in layer {layer}, "
                f"KV head {head}, and {target} were asked for"
            )

    def after_append(self, cache: KVCache, appended: Appended) -> None:
        """Called when vision rows have been committed, with the queries of ``needs.probe_layers``."""

    @property
    def keeps_first_frame(self) -> bool:
        """Return whether frame 0 never leaves: later frames see it for good when they are prefilled with ST-SpAttn."""
        return self.needs.variant == "st-spattn"

    def protected(self, cache: KVCache, layer: int) -> Bool:
        """Rows that stay whatever their score, ``[kv_heads, n_l]``: prefix and text, frame 0 if :attr:`keeps_first_frame`."""
        kind = cache.kind(layer)
        mask: Bool = (kind == Kind.PREFIX) | (kind == Kind.TEXT)
        return mask | ((kind == Kind.VISION) & (cache.frame(layer) == 0)) if self.keeps_first_frame else mask

    def beside_first_frame(self, cache: KVCache, layer: int, target: int) -> int:
        """``target`` without the rows of a frame 0 that stays whatever its score."""
        if not self.keeps_first_frame:
            return target
        first = (cache.kind(layer)[0] == Kind.VISION) & (cache.frame(layer)[0] == 0)
        return max(0, target - int(first.sum()))

    def keep_top(self, cache: KVCache, layer: int, score: NDArray[np.floating], target: int) -> Bool:
        """The protected rows, and of the others the best by ``score`` ``[kv_heads, n_l]`` until ``target`` count in |M|."""
        fixed, shape = self.protected(cache, layer), getattr(score, "shape", None)
        if shape != fixed.shape:
            given = type(score).__name__ if shape is None else list(shape)
            raise UserError(f"policy {self.name}: a score of layer {layer} is {given}, not an array {list(fixed.shape)}")
        target = self.beside_first_frame(cache, layer, target)
        return fixed | kernels.top_k(np.ascontiguousarray(score, np.float32), cache.seq(layer), ~fixed, target)


class FixedTarget(Policy):
    """A policy whose |C| is ``target`` |M|."""

    target: float

    @property
    def compress_to(self) -> int:
        return tokens_of(self.target, self.budget)


class SteadyTarget(Policy):
    """A policy whose |C| does not depend on the rows that come: ``target`` |M|, or less if a frame needs more."""

    target: float

    @property
    def compress_to(self) -> int:
        return max(0, min(tokens_of(self.target, self.budget), self.budget - self.shape.tokens_per_frame))


class EvictsOnDemand(Policy):
    """A policy that evicts as much as is asked: pieces of a quarter of |M|, as a larger one would see little of the past."""

    @property
    def max_append(self) -> int:
        return max(self.budget // 4, self.shape.tokens_per_frame)


def counted(kind: NDArray[np.uint8]) -> Bool:
    """Rows that count in |M|: vision and summaries."""
    among: Bool = (kind == Kind.VISION) | (kind == Kind.SUMMARY)
    return among


def frame_text(cache: KVCache, layer: int) -> Bool:
    """Text that stands around frames, ``[kv_heads, n_l]``; the same rows in every head."""
    text: Bool = cache.kind(layer) == Kind.TEXT
    return text & (cache.frame(layer) >= 0) if text.any() else text


def without_lone_text(cache: KVCache, layer: int, keep: Bool) -> Bool:
    """``keep`` without the text of frames of which no head keeps a token."""
    frame, text = cache.frame(layer), frame_text(cache, layer)
    return keep & ~(text & ~np.isin(frame, frame[keep & (cache.kind(layer) == Kind.VISION)]))


def tokens_of(fraction: float, count: int) -> int:
    """``floor(fraction * count)`` that does not fall below an exact product by rounding (0.75 * 4 is 3)."""
    return math.floor(fraction * count + 1e-9)


def newest(seq: NDArray[np.int64], among: Bool, count: int) -> Bool:
    """Per head the ``count`` newest rows by ``seq``: all arrays ``[kv_heads, n]``."""
    age = (seq - seq.max(initial=0)).astype(np.float32)  # where it is rounded to equal numbers, seq decides
    return kernels.top_k(age, seq, among, count)


def setting(
    default: Any, help: str, *, above: float | None = None, at_least: float | None = None, below: float | None = None,
    at_most: float | None = None,
) -> Any:  # fmt: skip
    """A field that the command line sets: its default, what it means in one sentence, and the range of its numbers."""
    edges = {"above": above, "at least": at_least, "below": below, "at most": at_most}
    span = {word: edge for word, edge in edges.items() if edge is not None}
    return field(default=default, metadata={"help": help, "range": span})


def setting_fields(policy: type[Policy]) -> tuple[Field[Any], ...]:
    """The settings of a policy, in order; none for one that is no dataclass."""
    return fields(policy) if is_dataclass(policy) else ()


TESTS: Mapping[str, Callable[[float, float], bool]] = {
    "above": operator.gt, "at least": operator.ge, "below": operator.lt, "at most": operator.le,
}  # fmt: skip


def out_of_range(each: Field[Any], value: float) -> str:
    """What is wrong with a value of a setting, ``must be above 0 and at most 1, not 3``; empty where nothing is."""
    span = each.metadata.get("range", {})
    if all(TESTS[word](value, edge) for word, edge in span.items()):
        return ""
    return f"must be {' and '.join(f'{word} {edge:g}' for word, edge in span.items())}, not {value}"


def parse_settings(text: str) -> tuple[str, dict[str, str]]:
    """Split ``name:key=value,key=value`` into the name and its settings."""
    name, options = split_options(text)
    pairs = [part.partition("=") for part in options.split(",") if part]
    return name, {key.strip(): value.strip() for key, _, value in pairs}
