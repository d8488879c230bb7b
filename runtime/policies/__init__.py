"""The registry of policies: one file and one line each."""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import Literal, get_args, get_origin, get_type_hints

from edgevlm.errors import UserError
from edgevlm.runtime.policies.base import Appended, Guidance, Needs, NewRows, Plan, Policy, StreamShape, parse_settings
from edgevlm.runtime.policies.full import Full
from edgevlm.runtime.policies.h2o import H2O
from edgevlm.runtime.policies.hermes import Hermes
from edgevlm.runtime.policies.hybrid import Hybrid
from edgevlm.runtime.policies.infinipot_v import InfiniPotV
from edgevlm.runtime.policies.last_seen import LastSeen
from edgevlm.runtime.policies.mosaic import Mosaic
from edgevlm.runtime.policies.purekv import PureKV
from edgevlm.runtime.policies.random_tokens import RandomTokens
from edgevlm.runtime.policies.rekv import ReKV
from edgevlm.runtime.policies.resv import ReSV
from edgevlm.runtime.policies.sliding_window import SlidingWindow
from edgevlm.runtime.policies.snapkv import SnapKV
from edgevlm.runtime.policies.snapkv_guided import SnapKVGuided
from edgevlm.runtime.policies.streaming_llm import StreamingLLM
from edgevlm.runtime.policies.uniform import Uniform

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        Full,
        SlidingWindow,
        StreamingLLM,
        Uniform,
        RandomTokens,
        SnapKV,
        SnapKVGuided,
        H2O,
        InfiniPotV,
        Hermes,
        PureKV,
        LastSeen,
        Mosaic,
        ReKV,
        Hybrid,
        ReSV,
    )
}

__all__ = ["POLICIES", "Appended", "Guidance", "Needs", "NewRows", "Plan", "Policy", "StreamShape", "create_policy", "evicting"]


def evicting() -> list[str]:
    """Names of the policies that compress, and need nothing below the cache."""
    return [name for name, policy in POLICIES.items() if policy.bounded and not policy.retrieves]


def create_policy(text: str) -> Policy:
    """Make a policy from ``name`` or ``name:setting=value,...``; raises UserError naming the nearest right word."""
    name, settings = parse_settings(text)
    if name not in POLICIES:
        raise UserError(f"there is no policy {name!r}{_nearest(name, list(POLICIES))}")
    policy = POLICIES[name]
    defaults = {field.name: field.default for field in fields(policy)}  # type: ignore[arg-type]
    hints = get_type_hints(policy)
    values: dict[str, object] = {}
    for key, value in settings.items():
        if key not in defaults:
            raise UserError(f"policy {name} has no setting {key!r}{_nearest(key, list(defaults))}")
        try:
            values[key] = _convert(value, hints[key])
        except ValueError:
            raise UserError(f"policy {name}: {value!r} does not fit {key} (default {defaults[key]})") from None
    try:
        return policy(**values)
    except ValueError as error:
        raise UserError(f"policy {name}: {error}") from None


def _convert(text: str, kind: type) -> object:
    if get_origin(kind) is Literal:
        if text not in get_args(kind):
            raise ValueError(text)
        return text
    if kind is bool:
        return {"on": True, "off": False}[text] if text in ("on", "off") else bool(["false", "true"].index(text))
    return kind(text)


def _nearest(word: str, words: list[str]) -> str:
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.4)
    return f"; did you mean {close[0]}?" if close else f"; there are: {', '.join(words) or 'none'}"
