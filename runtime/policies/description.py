"""Describe a policy in words taken from its dataclass fields and docstring."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

from edgevlm.runtime.policies.base import Policy, setting_fields


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a policy. ``choices``: the words that the setting accepts; empty for numbers and texts."""

    name: str
    default: object
    choices: list[str]
    meaning: str


@dataclass(frozen=True, slots=True)
class Description:
    """The description of a policy. ``ours``: how the policy deviates from its paper; empty for baselines without a paper."""

    policy: str
    paper: str
    idea: str
    settings: list[Setting]
    ours: str


def describe(policy: type[Policy]) -> Description:
    """Describe a policy by its settings and two paragraphs of its docstring: the first and the one after ``Ours:``."""
    text = [" ".join(part.split()).replace("``", "") for part in (inspect.getdoc(policy) or "").split("\n\n")]
    ours = next((part.removeprefix("Ours: ") for part in text if part.startswith("Ours: ")), "")
    settings = []
    for each in setting_fields(policy):
        kind = get_type_hints(policy)[each.name]
        choices = ["on", "off"] if kind is bool else list(get_args(kind)) if get_origin(kind) is Literal else []
        settings.append(Setting(each.name, each.default, choices, each.metadata.get("help", "")))
    return Description(policy.name, policy.paper, text[0], settings, ours)
