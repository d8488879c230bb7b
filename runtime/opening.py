"""From a session's settings to its stream."""

from __future__ import annotations

import numpy as np

from edgevlm.errors import UserError
from edgevlm.runtime.auto import chosen_policy
from edgevlm.runtime.chat import Chat
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import Policy
from edgevlm.runtime.positions import Reindexing
from edgevlm.runtime.room import TextRoom, default_budget, frames_ahead, text_room
from edgevlm.runtime.stream import Stream

RULES: tuple[Reindexing, ...] = ("lazy", "eager")  # of a session


def check_whole(**numbers: object) -> None:
    """Refuse settings that are neither None nor whole numbers."""
    for name, number in numbers.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, int | np.integer)):
            raise UserError(f"{name} is a whole number, not {number!r}")


def check_settings(budget: int | None, chunk: int, reindexing: str) -> None:
    """Refuse what is wrong whatever the model, before it is loaded."""
    check_whole(budget=budget, chunk=chunk)
    if chunk < 1:
        raise UserError(f"a chunk of {chunk} frames is too small; give 1 or more")
    if reindexing not in RULES:
        raise UserError(f"reindexing is {' or '.join(RULES)}, not {reindexing!r}")


def open_stream(
    model: Model, policy: Policy, budget: int | None, chunk: int, reindexing: Reindexing, chat: Chat, room: TextRoom,
    *, auto: bool, snapshots: bool,
) -> tuple[Stream, str]:  # fmt: skip
    """Allocate the memory and append the prefix; the default budget unless given. Raises UserError as ``Session.open`` says.

    auto: ``policy`` makes way for the one that was found best on this model, and why is the second thing returned.
    """
    prefix, text = model.encode(chat.prefix), text_room(model, room)
    if budget is None:
        ahead = frames_ahead(model, chunk) if policy.appends_first else 0
        budget = default_budget(model, policy, model.bundle.limit - len(prefix) - text - ahead)
    chosen, why = chosen_policy(model.bundle, int(budget)) if auto else (policy, "")
    return Stream(model, chosen, int(budget), prefix, text, reindexing, int(chunk), snapshots), why
