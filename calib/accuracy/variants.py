"""Define variants (policies with their settings), budgets, and runs at equal bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from edgevlm.calib.accuracy.memory_accounting import equal_byte_budget
from edgevlm.errors import UserError
from edgevlm.runtime.policies import POLICIES, create_policy
from edgevlm.runtime.positions import Reindexing
from edgevlm.runtime.settings import ALL, AUTO, CHANGED, parse_append, parse_budget, parse_encode

Record = dict[str, Any]  # a line of a journal

FULL = "full"
ORACLE = "oracle"

_WAY = rf"(?:{CHANGED}[^@]*|{AUTO})"
_PARTS = re.compile(rf"(.*?)(@eager)?(?:@({_WAY}))?(?:@encode:({_WAY}))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy with its settings, such as ``hermes:summary=off``.

    Suffixes: ``@eager`` (re-index eagerly), ``@changed:..`` (append only changes), ``@encode:changed:..`` (encode only
    changes).
    """

    label: str

    @property
    def _parts(self) -> tuple[str, ...]:
        found = _PARTS.fullmatch(self.label)
        return tuple(found.groups("")) if found else (self.label, "", "", "")

    @property
    def is_oracle(self) -> bool:
        return self.label == ORACLE or self.label.startswith(f"{ORACLE}/")

    @property
    def policy(self) -> str:
        return self._parts[0]

    @property
    def reindexing(self) -> Reindexing:
        return "eager" if self._parts[1] else "lazy"

    @property
    def append(self) -> str:
        return self._parts[2] or ALL

    @property
    def encode(self) -> str:
        return self._parts[3] or ALL

    @property
    def on_full_frames(self) -> Variant:
        return Variant("".join(self._parts[:2]))

    @property
    def changes(self) -> str:
        """Return the part of the label that names ``append`` and ``encode``, or an empty string if both are ``all``."""
        return self.label.removeprefix(self.on_full_frames.label)

    def under(self, append: str, encode: str = ALL) -> Variant:
        """Return this policy with other settings of ``append`` and ``encode``: ``all``, ``changed[:...]`` or ``auto``.

        Raises UserError for an invalid setting.
        """
        appended = "" if parse_append(append)[0] == ALL else f"@{append}"
        encoded = "" if parse_encode(encode)[0] == ALL else f"@encode:{encode}"
        return Variant(f"{self.label}{appended}{encoded}")


@dataclass(frozen=True, slots=True)
class Budget:
    """A number of vision tokens per layer, or a fraction of a stream's vision tokens such as ``12.5%``."""

    text: str
    fraction: float = 0.0
    count: int | None = None

    def tokens(self, stream_tokens: int) -> int:
        return int(self.fraction * stream_tokens + 1e-9) if self.count is None else self.count


@dataclass(frozen=True, slots=True)
class VariantRun:
    """A policy to run with a budget of ``tokens``. ``allowed``: the most bytes for cache and policy; 0 means no limit."""

    label: str
    budget: str
    tokens: int
    allowed: int = 0


@dataclass(frozen=True, slots=True)
class SkippedRun:
    label: str
    budget: str
    reason: str


def key_of(record: Record) -> tuple[str, str, int]:
    """Return what identifies a record in the journal: its policy, budget and stream."""
    return record["policy"], record["budget"], record["stream"]


PLAIN = Variant("sliding-window")  # the policy whose bytes no other policy may exceed


def equal_byte_runs(
    variants: Sequence[Variant], budget: str, tokens: int, per_token: int, least: int,
    peak_bytes: Callable[[Variant, int], int], unlimited: Collection[Variant] = (),
) -> Iterator[VariantRun | SkippedRun]:  # fmt: skip
    """Yield, for each variant, a run that takes at most the bytes of a sliding window of ``tokens`` tokens, or a SkippedRun.

    Each variant gets the largest budget that fits in these bytes; variants in ``unlimited`` get a budget of ``tokens``.
    ``peak_bytes`` returns a variant's bytes at a budget. ``per_token``, ``least``: see :func:`equal_byte_budget`.
    """
    try:
        allowed = peak_bytes(PLAIN, tokens)
    except UserError as error:
        names = dict.fromkeys(ORACLE if variant.is_oracle else variant.label for variant in variants)
        yield from (SkippedRun(name, budget, reason_of(error)) for name in names)
        return
    for variant in variants:
        if variant in unlimited:
            yield VariantRun(variant.label, budget, tokens)
            continue
        try:
            most = equal_byte_budget(tokens, allowed, per_token, least, partial(peak_bytes, variant))
            yield VariantRun(variant.label, budget, most, allowed)
        except UserError as error:
            yield SkippedRun(variant.label, budget, reason_of(error))


def reason_of(error: UserError) -> str:
    """Return an error's text without the advice on ``--budget``."""
    return re.sub(r"; \w+ a larger --budget.*", "", str(error))


def parse_variants(texts: list[str]) -> list[Variant]:
    """Parse ``--policy`` values (``all``, ``auto``, ``oracle`` or policies, separated by commas) and leave out ``full``.

    A ``setting=value`` after a comma belongs to the policy before it. Raises UserError for an unknown policy or setting, and
    for a policy that holds whole streams.
    """
    labels: list[str] = []
    for name in (name for text in texts for name in split(text)):
        if name == "all":
            labels += [ORACLE, *(policy for policy, kind in POLICIES.items() if kind.bounded)]
        elif name in (AUTO, ORACLE, FULL) or create_policy(Variant(name).policy).bounded:
            labels.append(name)
        else:
            raise UserError(f"--policy {name}: holds whole streams, so it cannot be compared at a budget; remove it")
    return [Variant(label) for label in dict.fromkeys(labels) if label != FULL]


def split(text: str) -> list[str]:
    """Split ``a,b:x=1,y=2,c`` into ``a``, ``b:x=1,y=2`` and ``c``."""
    names: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if names and "=" in part and ":" not in part.partition("=")[0]:
            names[-1] += f",{part}"
        else:
            names.append(part)
    return names


def parse_budgets(text: str) -> list[Budget]:
    """Parse budgets such as ``12.5%,50%`` (of a stream) or ``512,6k`` (tokens per layer). Raises UserError."""
    budgets = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        fraction = float(part[:-1]) / 100 if re.fullmatch(r"\d+(\.\d+)?%", part) else 0.0
        budgets[part] = Budget(part, fraction) if part.endswith("%") else Budget(part, count=parse_budget(part))
    if not budgets or not all(budget.fraction <= 1 and budget.tokens(1 << 30) for budget in budgets.values()):
        raise UserError(
            f"--budget {text}: give percentages of the stream, such as 12.5%, or vision tokens per layer, such as 512"
        )
    return list(budgets.values())
