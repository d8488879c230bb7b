"""What is compared: variants (policies with their settings), their budgets, and runs at equal bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from edgevlm.calib.accuracy.memory_accounting import equal_byte_budget
from edgevlm.errors import UserError
from edgevlm.runtime.policies import POLICIES, create_policy
from edgevlm.runtime.positions import Reindexing
from edgevlm.runtime.settings import ALL, AUTO, CHANGED, parse_append, parse_encode

FULL = "full"
ORACLE = "oracle"

ABLATIONS = (
    "infinipot-v",
    "infinipot-v:alpha=1",
    "infinipot-v:alpha=0",
    "infinipot-v:alpha=0.25",
    "infinipot-v:alpha=0.75",
    "infinipot-v:alpha=1,tar=reverse",
    "infinipot-v:alpha=1,tar=frame",
    "infinipot-v:alpha=0,van=reverse",
    "infinipot-v:alpha=0,tau=-3/-2/-1",
    "infinipot-v:tau=-3/-2/-1",
    "infinipot-v:recent=0.25",
    "infinipot-v:recent=0.5",
    "infinipot-v:target=0.5",
    "infinipot-v:target=0.9",
    "infinipot-v:keep_recent=off",
    "infinipot-v:heads=shared",
    "infinipot-v:keys=rotated",
    "infinipot-v:keys=rotated,alpha=1",
    "hermes",
    "hermes:smoothing=off",
    "hermes:summary=off",
    "hermes:lambdas=0/0/0.5",
    "hermes:lambdas=0.5/0.5/0.5",
    "hermes:layer_weights=1.3/1/0.7",
    "hermes:layer_weights=0.7/1/1.3",
    "hermes:join=rank,summary=last",
    "hermes:global_prompt=what color was the square?,local_prompt=how many objects are there now?",
    "hermes:mode=official",
    "hermes@eager",
    "purekv",
    "purekv:cross=off",
    "purekv:values=off",
    "purekv:st_spattn=on",
    "purekv:clie=0",
    "purekv:clie=1",
    "snapkv:clie=2",
    "h2o:clie=2",
    "streaming-llm:clie=2",
    "last-seen",
    "last-seen:against=held",
    "last-seen:heads=own",
    "last-seen:keys=rotated",
    "last-seen:layer=0",
    "last-seen:target=0.9",
    "mosaic",
    "mosaic:clustering=none",
    "mosaic:clustering=visual",
    "mosaic:clustering=semantic",
    "mosaic:splits=eager",
    "mosaic:prefetch=off",
    "mosaic:prefill=fetch",
)
"""The papers' ablations that make sense here: InfiniPot-V Tabs. 5, A1, A2 and rotated keys; HERMES Tabs. 5, 6, 7, 9 and 10;
PureKV Tabs. 4 and 6 and fig. 5; Mosaic Tab. IV, figs. 8 and 9(b); and those of last-seen. Rows whose settings the installed
policies do not have are left out, and named."""


_WAY = rf"(?:{CHANGED}[^@]*|{AUTO})"
_SUFFIXES = re.compile(rf"(@eager)?(?:@({_WAY}))?(?:@encode:({_WAY}))?$")


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy with its settings: ``name`` or ``name:setting=value,...``.

    ``@eager`` behind it is for eager re-indexing, ``@changed:tau=T`` for a memory that only what changed enters,
    ``@encode:changed:interval=K`` for a tower that only what changed goes through.
    """

    label: str

    @property
    def is_oracle(self) -> bool:
        return self.label == ORACLE or self.label.startswith(f"{ORACLE}/")

    @property
    def policy(self) -> str:
        return _SUFFIXES.sub("", self.label)

    @property
    def reindexing(self) -> Reindexing:
        return "eager" if self._suffixes[0] else "lazy"

    @property
    def append(self) -> str:
        return self._suffixes[1] or ALL

    @property
    def encode(self) -> str:
        return self._suffixes[2] or ALL

    @property
    def on_full_frames(self) -> Variant:
        """The same policy on whole frames."""
        return Variant(self.policy + (self._suffixes[0] or ""))

    @property
    def changes(self) -> str:
        """What of its label says what is encoded and appended; empty for whole frames."""
        return self.label.removeprefix(self.on_full_frames.label)

    @property
    def _suffixes(self) -> tuple[str | None, str | None, str | None]:
        found = _SUFFIXES.search(self.label)
        return (found[1], found[2], found[3]) if found else (None, None, None)

    def under(self, append: str, encode: str = ALL) -> Variant:
        """The same policy, each ``all``, ``changed[:...]`` or ``auto``. Raises UserError if it is none of them."""
        appended = "" if parse_append(append).name == ALL else f"@{append}"
        encoded = "" if parse_encode(encode).name == ALL else f"@encode:{encode}"
        return Variant(f"{self.label}{appended}{encoded}")

    @property
    def exists(self) -> bool:
        """Whether the installed policies have its settings."""
        try:
            create_policy(self.policy)
        except UserError:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Budget:
    """As typed: a fraction of the vision tokens of a whole stream (``12.5%``), or ``count`` vision tokens per layer."""

    text: str
    fraction: float = 0.0
    count: int | None = None

    def tokens(self, stream_tokens: int) -> int:
        """|M| for a stream of so many vision tokens."""
        return int(self.fraction * stream_tokens + 1e-9) if self.count is None else self.count


@dataclass(frozen=True, slots=True)
class VariantRun:
    """A variant at a budget. tokens: |M|; allowed: bytes that cache and policy may take together, 0 for any number."""

    label: str
    budget: str
    tokens: int
    allowed: int = 0


@dataclass(frozen=True, slots=True)
class SkippedRun:
    label: str
    budget: str
    reason: str


PLAIN = Variant("sliding-window")  # holds nothing beside the cache: its bytes are what everybody gets


def equal_byte_runs(
    variants: Sequence[Variant],
    budget: str,
    tokens: int,
    per_token: int,
    least: int,
    peak_bytes: Callable[[Variant, int], int],
    unlimited: Collection[Variant] = (),
) -> Iterator[VariantRun | SkippedRun]:
    """Each variant at ``tokens``, or at the most that takes no more bytes than a sliding window of as many; or why not.

    per_token, least: see :func:`equal_byte_budget`. peak_bytes: measures a variant at a budget. unlimited:
    variants that may take any number of bytes.
    """
    try:
        allowed = peak_bytes(PLAIN, tokens)
    except UserError as error:
        names = dict.fromkeys(ORACLE if variant.is_oracle else variant.label for variant in variants)
        yield from (SkippedRun(name, budget, reason_of(error)) for name in names)
        return
    for variant in variants:
        try:
            if variant in unlimited:
                yield VariantRun(variant.label, budget, tokens)
            else:
                most = equal_byte_budget(tokens, allowed, per_token, least, partial(peak_bytes, variant))
                yield VariantRun(variant.label, budget, most, allowed)
        except UserError as error:
            yield SkippedRun(variant.label, budget, reason_of(error))


def reason_of(error: UserError) -> str:
    """Why a policy cannot run at a budget, without the advice to ``--budget``."""
    return str(error).partition("; give --budget")[0]


def parse_variants(texts: list[str]) -> tuple[list[Variant], list[str]]:
    """What ``--policy`` names, once each and without ``full``, which always runs; and the ablations that do not exist.

    A text is ``all``, ``ablations``, ``auto``, ``oracle`` or policies, parted by commas; a comma before ``setting=value``
    belongs to the policy before it. Raises UserError for a policy or setting that does not exist, or one that holds whole
    streams.
    """
    labels: list[str] = []
    missing: list[str] = []
    for name in (name for text in texts for name in split(text)):
        if name == "all":
            labels += [ORACLE, *(policy for policy, kind in POLICIES.items() if kind.bounded)]
        elif name == "ablations":
            labels += [label for label in ABLATIONS if Variant(label).exists]
            missing += [label for label in ABLATIONS if not Variant(label).exists]
        else:
            if name not in (AUTO, ORACLE, FULL) and not create_policy(Variant(name).policy).bounded:
                raise UserError(f"--policy {name}: holds whole streams and has no budget to be compared at; leave it out")
            labels.append(name)
    return [Variant(label) for label in dict.fromkeys(labels) if label != FULL], missing


def split(text: str) -> list[str]:
    """``a,b:x=1,y=2,c`` is ``a``, ``b:x=1,y=2`` and ``c``."""
    names: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if names and "=" in part and ":" not in part.partition("=")[0]:
            names[-1] += f",{part}"
        else:
            names.append(part)
    return names


def parse_tokens(text: str) -> list[Budget]:
    """``256,512``: vision tokens per layer. Raises UserError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) for part in parts):
        raise UserError(f"--budget {text}: give vision tokens per layer, like 256,512; a long stream has no whole to share")
    return [Budget(part, count=int(part)) for part in dict.fromkeys(parts)]


def parse_budgets(text: str) -> list[Budget]:
    """``50%,12.5%``: fractions above 0 and up to 100 %. Raises UserError."""
    budgets = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            fraction = float(part.removesuffix("%")) / 100
        except ValueError:
            fraction = 0.0
        if not part.endswith("%") or not 0 < fraction <= 1:
            raise UserError(f"--budget {part}: give percentages of the stream's vision tokens, like 12.5% or 50%,6.25%")
        budgets[part] = Budget(part, fraction)
    if not budgets:
        raise UserError("--budget is empty: give percentages of the stream's vision tokens, like 12.5%")
    return list(budgets.values())
