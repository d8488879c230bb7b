"""What is compared: policies with their settings, the ablations by name, and budgets as shares of a stream."""

from __future__ import annotations

from dataclasses import dataclass

from edgevlm.errors import UserError
from edgevlm.runtime.auto import AUTO
from edgevlm.runtime.policies import POLICIES, create_policy
from edgevlm.runtime.positions import Reindexing

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


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of the comparison: ``name``, ``name:setting=value,...``, either with ``@eager`` for eager re-indexing."""

    label: str

    @property
    def is_oracle(self) -> bool:
        return self.label == ORACLE or self.label.startswith(f"{ORACLE}/")

    @property
    def policy(self) -> str:
        return self.label.removesuffix("@eager")

    @property
    def reindexing(self) -> Reindexing:
        return "eager" if self.label.endswith("@eager") else "lazy"


@dataclass(frozen=True, slots=True)
class Budget:
    """A share of the vision tokens of a whole stream, as typed, like ``12.5%``."""

    text: str
    fraction: float

    def tokens(self, whole: int) -> int:
        return int(self.fraction * whole + 1e-9)


WHOLE = Budget("100%", 1.0)


@dataclass(frozen=True, slots=True)
class Tokens(Budget):
    """Vision tokens per layer, whatever the stream, as typed; ``fraction`` is their number."""

    def tokens(self, whole: int) -> int:
        return int(self.fraction)


def parse_entries(texts: list[str]) -> tuple[list[Entry], list[str]]:
    """What ``--policy`` names, once each and without ``full``, which always runs; and the ablations there are no settings for.

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
            labels += [label for label in ABLATIONS if exists(label)]
            missing += [label for label in ABLATIONS if not exists(label)]
        else:
            if name not in (AUTO, ORACLE, FULL) and not create_policy(Entry(name).policy).bounded:
                raise UserError(f"--policy {name}: holds whole streams and has no budget to be compared at; leave it out")
            labels.append(name)
    return [Entry(label) for label in dict.fromkeys(labels) if label != FULL], missing


def split(text: str) -> list[str]:
    """``a,b:x=1,y=2,c`` is ``a``, ``b:x=1,y=2`` and ``c``."""
    names: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if names and "=" in part and ":" not in part.partition("=")[0]:
            names[-1] += f",{part}"
        else:
            names.append(part)
    return names


def exists(label: str) -> bool:
    try:
        create_policy(Entry(label).policy)
    except UserError:
        return False
    return True


def parse_tokens(text: str) -> list[Budget]:
    """``256,512``: vision tokens per layer. Raises UserError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and int(part) for part in parts):
        raise UserError(f"--budget {text}: give vision tokens per layer, like 256,512; a long stream has no whole to share")
    return [Tokens(part, float(part)) for part in dict.fromkeys(parts)]


def parse_budgets(text: str) -> list[Budget]:
    """``50%,12.5%``: shares above 0 and up to 100 %. Raises UserError."""
    budgets = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            fraction = float(part.removesuffix("%")) / 100
        except ValueError:
            fraction = 0.0
        if not part.endswith("%") or not 0 < fraction <= 1:
            raise UserError(f"--budget {part}: give shares of the stream's vision tokens, like 12.5% or 50%,6.25%")
        budgets[part] = Budget(part, fraction)
    if not budgets:
        raise UserError("--budget is empty: give shares of the stream's vision tokens, like 12.5%")
    return list(budgets.values())
