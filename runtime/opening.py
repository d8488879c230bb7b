"""From a session's settings to its stream."""

from __future__ import annotations

import numpy as np

from edgevlm.errors import UserError
from edgevlm.runtime.auto import chosen_policy
from edgevlm.runtime.budget import TextRoom, default_budget, frames_ahead, text_room
from edgevlm.runtime.chat import Chat
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import Policy
from edgevlm.runtime.policies.retrieval import Retrieval
from edgevlm.runtime.positions import Reindexing
from edgevlm.runtime.snapshots.folder import snapshots
from edgevlm.runtime.snapshots.image import model_hash, policy_text
from edgevlm.runtime.snapshots.keeper import Keeper
from edgevlm.runtime.store import Store, StoreSettings
from edgevlm.runtime.store.file import TEMPORARY
from edgevlm.runtime.stream import Stream

STORE = "store.bin"  # in the folder of snapshots
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
    *, auto: bool, keeper: Keeper | None, store: StoreSettings | None,
) -> tuple[Stream, str]:  # fmt: skip
    """Allocate the memory and append the prefix; the default budget unless given. Raises UserError as ``Session.open`` says.

    auto: ``policy`` makes way for the one that was found best on this model, and why is the second thing returned. keeper: of
    snapshots, in whose folder a store lies too.
    """
    prefix, text = model.encode(chat.prefix), text_room(model, room)
    if budget is None:
        ahead = frames_ahead(model, chunk) if policy.appends_first else 0
        budget = default_budget(model, policy, model.bundle.limit - len(prefix) - text - ahead)
    chosen, why = chosen_policy(model.bundle, int(budget)) if auto else (policy, "")
    check_store(chosen, store)
    below = open_store(model, chosen, keeper, store or StoreSettings()) if isinstance(chosen, Retrieval) else None
    try:
        return Stream(model, chosen, int(budget), prefix, text, reindexing, int(chunk), keeper is not None, below), why
    except BaseException:
        if below is not None:
            below.close()
        raise


def check_store(policy: Policy, store: StoreSettings | None) -> None:
    """Refuse settings of a store for a policy that has none."""
    if store is not None and not isinstance(policy, Retrieval):
        raise UserError(f"{policy.name} retrieves nothing that it has evicted: leave out --store-bytes and --host-bytes")


def open_store(model: Model, policy: Policy, keeper: Keeper | None, settings: StoreSettings) -> Store:
    """In the keeper's folder, or without a name. A file that no snapshot tells the blocks of is begun anew."""
    if keeper is None:
        return Store(TEMPORARY, settings=settings)
    path = keeper.folder / STORE
    if not snapshots(keeper.folder):
        path.unlink(missing_ok=True)
    return Store(path, f"{model_hash(model.bundle)} {policy_text(policy)}", settings)
