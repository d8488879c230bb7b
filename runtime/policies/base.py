"""Define the policy interface: before rows are appended to the cache, a policy chooses which rows stay."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import cache as once
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from edgevlm.errors import UserError
from edgevlm.runtime.bundle import FADING
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.plugins import is_foreign, place, split_options
from edgevlm.runtime.policies.layer import Bool, Compression, Float32, Guide, Layer, NewRows, layers_of
from edgevlm.runtime.stateful import Stateful, undeclared

if TYPE_CHECKING:
    from edgevlm.runtime.cache import KVCache
    from edgevlm.runtime.calibration import Calibration
    from edgevlm.runtime.evidence import FrameTimes


@dataclass(frozen=True, slots=True)
class Needs:
    """The data that a policy needs from the session in addition to the cache.

    ``probe_layers``: layers whose queries the policy gets after each vision append. ``guidance``: texts for a forward pass that
    the policy may request before a compression. ``guidance_layers``: layers whose queries and keys the guidance pass returns.
    ``variant``: the decoder graph for prefill. In the graph ``per-layer``, the policy chooses which rows each layer attends to.
    ``features``: whether the policy needs each frame's features. ``single_frames``: whether to append the changes of one frame
    at a time, even if the changes of several frames would fit. ``working_rows``: the number of rows per layer that every call
    overwrites; they do not count towards |M_l|.
    """

    probe_layers: tuple[int, ...] = ()
    guidance: tuple[str, ...] = ()
    guidance_layers: tuple[int, ...] = ()
    variant: str = "full"
    features: bool = False
    single_frames: bool = False
    working_rows: int = 0

    @property
    def keeps_first_frame(self) -> bool:
        """Whether frame 0 is never evicted, because with ST-SpAttn every later frame attends to it."""
        return self.variant == "st-spattn"


@dataclass(frozen=True, slots=True)
class StreamShape:
    """Facts about the model that a policy may use. ``tokens_per_frame``: the number p of tokens in a complete frame.

    ``prefix``: the number of rows that are never evicted. ``fading``: the decay k and the recency weight omega of HERMES for
    the model's family. ``thinned``: whether only the changed tokens of a frame are appended. ``text_per_frame``: the largest
    number of text rows around a frame.
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
    """The vision rows just appended. The ``seq`` and positions of these rows are the same in every layer and head.

    ``seq``: ``[n]``. ``position``: ``[n, axes]``. ``queries``: the rows' rotated queries in each probe layer, float32 ``[heads,
    n, head_dim]``. ``frame``: the number of each row's frame, ``[n]``. ``features``: the mean of each frame's features,
    ``[frames, row_width]``, for policies that need them.
    """

    seq: NDArray[np.int64]
    position: NDArray[np.int32]
    queries: Mapping[int, Float32]
    frame: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    features: Float32 | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The result of a compression. ``keep``: each layer's mask of rows to keep, ``[kv_heads, n_l]``, or None to keep all.

    ``add``: the rows to add to each layer. ``merged``: for each layer with merged rows, its keys and values after the merge, as
    stored.
    """

    keep: list[Bool | None]
    add: Mapping[int, NewRows] = field(default_factory=dict)
    merged: Mapping[int, Mapping[str, NDArray]] = field(default_factory=dict)

    def carry_out(self, cache: KVCache) -> int:
        """Apply the plan to ``cache``, and return the number of evicted rows in all layers and heads."""
        for layer, parts in self.merged.items():
            cache.load(layer, {name: np.array(part) for name, part in cache.held(layer).items()} | dict(parts))
        evicted = cache.evict(self.keep)
        for layer, new in self.add.items():
            cache.append(layer, new.key, new.value, new.rows)
        return evicted


class Policy(Stateful):
    """The base class of policies, which decide which rows stay in the cache. The budget |M| is in vision tokens per layer.

    A subclass is a dataclass whose fields are its settings (:func:`setting`), and needs only one method::

        @dataclass
        class ShortKeys(Policy):
            def score(self, layer):
                return -np.linalg.norm(layer.keys, axis=-1)

    The base class keeps the prefix, the text, frame 0 if later frames always attend to it, and the rows with the highest
    scores. To choose rows without scores, or to merge rows, override :meth:`compress`. To compare several layers, override
    :meth:`prepare`. To rank by attention, name the layers whose queries you want in :attr:`needs`, and receive the queries in
    :meth:`after_append`.

    Create persistent state in :meth:`attach`, and name its attributes in ``state_fields``. Snapshots store the attributes in
    ``state_fields``, and the byte budget counts their arrays.
    """

    name: ClassVar[str]  # the name on the command line, by default the class's name
    paper: ClassVar[str] = ""
    bounded: ClassVar[bool] = True

    budget: int
    shape: StreamShape
    _stream: Callable[[], object] | None = None  # a weak reference to the policy's stream

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if problem := problem_of(cls):
            raise TypeError(problem)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """Raise ValueError if a setting is outside its range."""
        for name, problem in ((each.name, out_of_range(each, getattr(self, each.name))) for each in setting_fields(type(self))):
            if problem:
                raise ValueError(f"{name} {problem}")

    def attach(self, budget: int, shape: StreamShape) -> None:
        """Set the budget |M| (vision tokens per layer) and the stream's shape, before the first append."""
        self.budget, self.shape = budget, shape

    @property
    def needs(self) -> Needs:
        """The data that the policy needs from the session. Available after :meth:`attach`."""
        return Needs()

    @property
    def layer_budgets(self) -> NDArray[np.int64]:
        """Each layer's budget |M_l|, ``[layers]``. Available after :meth:`attach`."""
        return np.full(self.shape.layers, self.budget, np.int64)

    @property
    def compress_to(self) -> int:
        """The number |C| of vision tokens per layer after a compression, if no rows are about to be appended."""
        return self.budget

    @property
    def max_append(self) -> int:
        """The largest number of rows to append at once: the room that one compression makes, or one frame if that is more."""
        return max(self.budget - self.compress_to, self.shape.tokens_per_frame)

    @property
    def needs_whole_frames(self) -> bool:
        """Whether frames must be appended whole, so that ``--append changed`` is refused."""
        return False

    def prepare(self, layers: Sequence[Layer]) -> Any:
        """Compute what :meth:`compress` needs to know about all layers. Each layer gets the result as ``layer.prepared``."""

    def score(self, layer: Layer) -> NDArray[Any]:
        """Return a score for each row of a layer, ``[kv_heads, n]``. Rows with the highest scores stay; newer rows win ties."""
        raise NotImplementedError

    def compress(self, layer: Layer) -> None:
        """Call ``layer.keep`` or ``layer.merge`` so that ``layer.target`` rows stay, by default those with the best scores."""
        score: Any = self.score(layer)
        rows = layer.seq.shape
        if getattr(score, "shape", None) != rows:
            given = list(score.shape) if isinstance(score, np.ndarray) else type(score).__name__
            raise blame(self, "score", f"returned {given} for layer {layer.index}, not an array {list(rows)}")
        if score.dtype.kind not in "biuf" or np.isnan(score).any():
            what = "NaN" if score.dtype.kind == "f" else score.dtype
            raise blame(self, "score", f"returned {what} for layer {layer.index}; return a number for each row")
        layer.keep(layer.top(score, layer.target))

    def before_append(self, cache: KVCache, rows: int, guide: Guide | None, times: FrameTimes | None = None) -> Plan | None:
        """Return a plan that makes room for ``rows`` new rows within |M_l| in every layer, or None if there is room.

        Raises UserError if the policy keeps too many or too few rows.
        """
        held, budgets = cache.lengths - self.shape.prefix, self.layer_budgets
        if not self.bounded or np.all(held + rows <= budgets):
            return None
        fraction = self.compress_to / self.budget
        wanted = [max(0, min(tokens_of(fraction, int(budget)), int(budget) - rows)) for budget in budgets]
        due = [layer for layer, target in enumerate(wanted) if held[layer] > target]
        if not due:
            return None
        shared = Compression(rows, self.needs.guidance, guide and once(guide), times, self.needs.keeps_first_frame)
        layers = layers_of(cache, shared)
        for layer in layers:
            fixed = layer.kind[0] != Kind.PREFIX
            fixed &= layer.fixed[0]  # frame text and frame 0 count towards |M|
            layer.target = max(0, wanted[layer.index] - np.count_nonzero(fixed))
        shared.prepared = self.prepare(layers)
        keep: list[Bool | None] = [None] * len(layers)
        for layer in (layers[index] for index in due):
            self.compress(layer)
            keep[layer.index] = self._checked(layer)
        add = {layer.index: layer._added for layer in layers if layer._added is not None}
        return Plan(keep, add, {layer.index: layer._merged for layer in layers if layer._merged is not None})

    def _checked(self, layer: Layer) -> Bool:
        """Return a layer's mask of rows to keep, including prefix and text. Raises UserError for a wrong number of rows."""
        mask, shape = layer._kept, layer.seq.shape
        if mask is None or mask.shape != shape or mask.dtype != np.bool_:
            what = "nothing" if mask is None else f"{mask.dtype} {list(mask.shape)}"
            raise blame(self, "compress", f"kept {what} in layer {layer.index}, not a bool mask {list(shape)}")
        target = max(0, layer.target - (0 if layer._added is None else len(layer._added.rows)))
        for head, rows in enumerate((mask & layer.free).sum(1).tolist()):
            if rows != target:
                many = f"too {'few' if rows < target else 'many'} rows: {rows} in layer {layer.index}, KV head {head}"
                raise blame(self, "compress", f"keeps {many}, not {target}")
        return without_lone_text(layer, mask | layer.fixed)

    def after_append(self, layers: Sequence[Layer], appended: Appended) -> None:
        """Called after vision rows are appended. ``appended`` contains the queries of these rows in the layers
        ``needs.probe_layers``.
        """


def problem_of(cls: type[Policy]) -> str:
    """Return the error in a policy's class, with its source location, or an empty string if the class is valid."""
    written = any(getattr(cls, name) is not getattr(Policy, name) for name in ("score", "compress", "before_append"))
    if cls.bounded and not written:
        return f"{cls.__name__} defines neither score() nor compress()"
    if settings := [name for name, value in vars(cls).items() if isinstance(value, Field)]:
        return f"{cls.__name__} has settings ({', '.join(settings)}) but is not a dataclass; add @dataclass: {place(cls)}"
    for name in ("score", "compress", "prepare", "after_append"):
        ours, theirs = (list(signature(getattr(kind, name)).parameters) for kind in (Policy, cls))
        if len(ours) != len(theirs) and not any(each.startswith("*") for each in theirs):
            return f"{name} must accept ({', '.join(ours)}), not ({', '.join(theirs)}): {place(getattr(cls, name))}"
    return ""


def check_attached(policy: Policy) -> None:
    """Raise UserError if ``attach`` does not call the base method, or if ``needs`` names a layer that the model lacks."""
    if not hasattr(policy, "shape"):
        raise blame(policy, "attach", "does not call super().attach(budget, shape)")
    layers = policy.shape.layers
    for each in ("probe_layers", "guidance_layers"):
        if wrong := [layer for layer in getattr(policy.needs, each) if not 0 <= layer < layers]:
            what = f"needs.{each} lists layer {wrong[0]}, but the model has layers 0 to {layers - 1}"
            raise UserError(f"policy {policy.name}: {what} ({place(type(policy))})")
    check_declared(policy)


def check_declared(policy: Policy) -> None:
    """Raise UserError if a policy from outside edgevlm keeps arrays that its ``state_fields`` does not name."""
    if is_foreign(policy) and (names := undeclared(policy)):
        raise UserError(
            f"policy {policy.name} keeps arrays in {', '.join(names)}; add them to state_fields, or they are missing from its "
            f"byte count and from snapshots ({place(type(policy))})"
        )


def blame(policy: Policy, method: str, what: str) -> UserError:
    """Return a UserError that names the policy, the method and the method's source location."""
    where = place(getattr(type(policy), method)) if is_foreign(getattr(type(policy), method)) else ""
    return UserError(f"policy {policy.name}: {method}() {what}{where and f' ({where})'}")


class FixedTarget(Policy):
    """A policy that compresses each layer to |C| tokens, the fraction ``target`` of the budget |M|."""

    target: float

    @property
    def compress_to(self) -> int:
        return tokens_of(self.target, self.budget)


class SteadyTarget(Policy):
    """A policy that compresses each layer to |C| tokens: the fraction ``target`` of |M|, or less if a frame would not fit."""

    target: float

    @property
    def compress_to(self) -> int:
        return max(0, min(tokens_of(self.target, self.budget), self.budget - self.shape.tokens_per_frame))


class EvictsOnDemand(Policy):
    """A policy that evicts exactly as many rows as the new rows need.

    Frames are appended in pieces of at most a quarter of |M|, because a larger piece would evict most of the past.
    """

    @property
    def max_append(self) -> int:
        return max(self.budget // 4, self.shape.tokens_per_frame)


def without_lone_text(layer: Layer, keep: Bool) -> Bool:
    """Return the rows to keep, without the text of frames that keep no vision token in any head."""
    kind, frame = layer.kind, layer.frame
    text = (kind == Kind.TEXT) & (frame >= 0)
    return keep & ~(text & ~np.isin(frame, frame[keep & (kind == Kind.VISION)])) if text.any() else keep


def tokens_of(fraction: float, count: int) -> int:
    """Return ``floor(fraction * count)``, but round up a product that a rounding error put just below an integer."""
    return math.floor(fraction * count + 1e-9)


def setting(
    default: Any, help: str, *, above: float | None = None, at_least: float | None = None, below: float | None = None,
    at_most: float | None = None,
) -> Any:  # fmt: skip
    """Return a field that the command line can set, with a default, a one-sentence description, and its allowed range."""
    edges = {"above": above, "at least": at_least, "below": below, "at most": at_most}
    span = {word: edge for word, edge in edges.items() if edge is not None}
    return field(default=default, metadata={"help": help, "range": span})


def setting_fields(policy: type[Policy]) -> tuple[Field[Any], ...]:
    """Return a policy's settings in order, or none if the policy is not a dataclass."""
    return fields(policy) if is_dataclass(policy) else ()


TESTS: Mapping[str, Callable[[float, float], bool]] = {
    "above": operator.gt, "at least": operator.ge, "below": operator.lt, "at most": operator.le,
}  # fmt: skip


def out_of_range(each: Field[Any], value: float) -> str:
    """Return the error if a setting's value is out of range, such as ``must be at most 1, not 3``, else an empty string."""
    span = each.metadata.get("range", {})
    if all(TESTS[word](value, edge) for word, edge in span.items()):
        return ""
    return f"must be {' and '.join(f'{word} {edge:g}' for word, edge in span.items())}, not {value}"


def parse_settings(text: str) -> tuple[str, dict[str, str]]:
    """Split ``name:key=value,key=value`` into the name and its settings."""
    name, options = split_options(text)
    pairs = [part.partition("=") for part in options.split(",") if part]
    return name, {key.strip(): value.strip() for key, _, value in pairs}
