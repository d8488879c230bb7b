"""``edgevlm policies``: the policies and their settings, read from their dataclass fields and docstrings."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import asdict
from typing import Annotated

import typer

from edgevlm.apps.commands.cli_options import Json
from edgevlm.apps.schemas import json_line
from edgevlm.runtime.opening import AUTO, FALLBACK
from edgevlm.runtime.plugins import names
from edgevlm.runtime.policies import POLICIES, find_policy
from edgevlm.runtime.policies.description import Description, describe

LEGEND = (
    "|M|: the budget, in vision tokens per layer. f: the same in frames. |C|: what a compression leaves. "
    "A setting is given as in --policy NAME:SETTING=VALUE,SETTING=VALUE"
)


CHOSEN = Description(AUTO, "no policy of its own", f"What edgevlm calibrate found best on the model, else {FALLBACK}.", [], "")


def policies(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME|FILE.py:CLASS", help="Show this policy.", show_default="all")
    ] = None,
    json: Json = False,
) -> None:
    """List the policies and their settings.

    With each: its paper, its defaults and what differs from the paper.
    """
    typer.echo(list_policies(json, name))


def list_policies(as_json: bool, name: str | None = None) -> str:
    """One policy, or all, installed ones too, and auto: a JSON object a line, or a page for a person."""
    if name is None:
        described = [*map(describe, map(find_policy, dict.fromkeys([*POLICIES, *names("policies")]))), CHOSEN]
    else:
        described = [CHOSEN if name == AUTO else describe(find_policy(name))]
    if as_json:
        return "\n".join(json_line("policy", asdict(one)) for one in described)
    width = min(shutil.get_terminal_size().columns, 128)

    def indented(text: str, first: int, rest: int) -> str:
        return textwrap.fill(text, width, initial_indent=" " * first, subsequent_indent=" " * rest, break_on_hyphens=False)

    pages = []
    for one in described:
        lines = [f"{one.policy}   {one.paper}".rstrip(), indented(one.idea, 2, 2)]
        for each in one.settings:
            default = {True: "on", False: "off"}[each.default] if isinstance(each.default, bool) else each.default
            choices = f" ({'|'.join(each.choices)})" if each.choices else ""
            lines.append(indented(f"{each.name}={default}{choices}  {each.meaning}", 4, 8))
        pages.append("\n".join([*lines, *([indented(f"Ours: {one.ours}", 2, 2)] if one.ours else [])]))
    return "\n\n".join([*pages, textwrap.fill(LEGEND, width)])
