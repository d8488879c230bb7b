"""From a session's settings to its stream."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edgevlm.errors import UserError
from edgevlm.runtime.auto import AUTO, FALLBACK, chosen_policy
from edgevlm.runtime.budget import TextBudget, default_budget, frames_ahead, parse_budget, present_rows
from edgevlm.runtime.changed_encoder import ChangedEncoder
from edgevlm.runtime.changed_patches import EncodeSetting, parse_encode
from edgevlm.runtime.changes import CHANGED, AppendChanged, AppendSetting, parse_append
from edgevlm.runtime.chat import Chat
from edgevlm.runtime.model import Model
from edgevlm.runtime.plugins import blamed
from edgevlm.runtime.policies import Policy, create_policy
from edgevlm.runtime.policies.retrieval import Retrieval
from edgevlm.runtime.positions import Reindexing
from edgevlm.runtime.snapshots.capture import model_hash, policy_text
from edgevlm.runtime.snapshots.directory import snapshots
from edgevlm.runtime.snapshots.writer import SnapshotWriter
from edgevlm.runtime.store import Store, StoreSettings
from edgevlm.runtime.store.file import TEMPORARY
from edgevlm.runtime.stream import Stream

STORE = "store.bin"  # in the directory of snapshots
RULES: tuple[Reindexing, ...] = ("lazy", "eager")  # of a session


LATEST_S = 1e12  # of a timestamp: 30,000 years


def check_int(**numbers: object) -> None:
    """Refuse settings that are neither None nor integers."""
    for name, number in numbers.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, int | np.integer)):
            raise UserError(f"{name} is an integer, not {number!r}")


def check_time(timestamp: object) -> None:
    """Refuse what is no number of seconds, or one that no clock shows."""
    number = isinstance(timestamp, int | float | np.integer | np.floating) and not isinstance(timestamp, bool)
    if not number or not -LATEST_S < timestamp < LATEST_S:  # type: ignore[operator]
        raise UserError(f"timestamp is a number of seconds, not {str(timestamp)[:40]}")


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """The settings of a stream, checked as far as that needs no model. auto: ``policy`` makes way for the model's best."""

    policy: Policy
    auto: bool
    budget: int | None
    chunk: int
    reindexing: Reindexing
    store: StoreSettings | None
    append: AppendSetting
    encode: EncodeSetting

    @classmethod
    def checked(
        cls,
        policy: str | Policy | type[Policy],
        budget: int | str | None,
        chunk: int,
        reindexing: Reindexing,
        store: StoreSettings | None,
        append: str = AUTO,
        encode: str = AUTO,
    ) -> StreamSettings:
        """What ``Session.open`` was given. Raises UserError for what is wrong whatever the model."""
        budget = parse_budget(budget) if isinstance(budget, str) else budget
        check_int(budget=budget, chunk=chunk)
        if chunk < 1:
            raise UserError(f"a chunk of {chunk} frames is too small; give 1 or more")
        if reindexing not in RULES:
            raise UserError(f"reindexing is {' or '.join(RULES)}, not {reindexing!r}")
        budget = None if budget is None else int(budget)
        auto = isinstance(policy, str) and policy == AUTO
        settings = cls(
            as_policy(policy), auto, budget, int(chunk), reindexing, store, parse_append(append), parse_encode(encode)
        )
        if not settings.auto:
            check_store(settings.policy, store)
        return settings

    def encoder(self, model: Model, snapshots: bool) -> ChangedEncoder | None:
        """What encodes the changes alone; None where whole frames are encoded.

        ``auto`` is what calibration found, if the engine, the frames' size and the free memory allow it. Raises UserError where
        ``changed`` was asked for and they do not.
        """
        copies = 2 if snapshots else 1
        if self.encode.name == CHANGED:
            return ChangedEncoder(model.engine, model.bundle, self.encode.changed, copies)
        choices = model.bundle.choices() if self.encode.name == AUTO else None
        if not choices or not choices.encode or not choices.encode.setting:
            return None
        try:
            return ChangedEncoder(model.engine, model.bundle, parse_encode(choices.encode.setting).changed, copies)
        except UserError:
            return None

    def open(self, model: Model, chat: Chat, text: TextBudget, writer: SnapshotWriter | None) -> tuple[Stream, str]:
        """Allocate the memory and append the prefix; says why, where ``auto`` chose the policy and what to append.

        writer: of snapshots, in whose directory a store lies too. Raises UserError as ``Session.open`` does.
        """
        append = self._append(model, self.policy)
        prefix, rows, budget = model.encode(chat.prefix), text.rows(model), self.budget
        if budget is None:
            ahead = frames_ahead(model, self.chunk) if self.policy.appends_first else 0
            ahead += present_rows(model) if append is not None else 0
            budget = default_budget(model, self.policy, model.bundle.limit - len(prefix) - rows - ahead)
        policy, why = chosen_policy(model.bundle, budget) if self.auto else (self.policy, "")
        append = self._append(model, policy)
        if why and append is not None and self.append.name == AUTO:
            why += f"; append: {append}"
        check_store(policy, self.store)
        store = open_store(model, policy, writer, self.store or StoreSettings()) if isinstance(policy, Retrieval) else None
        try:
            with blamed(f"policy {policy.name}", policy):
                stream = Stream(
                    model, policy, budget, prefix, rows, self.reindexing, self.chunk, writer is not None, store, append
                )
            return stream, why
        except BaseException:
            if store is not None:
                store.close()
            raise

    def _append(self, model: Model, policy: Policy) -> AppendChanged | None:
        """What enters the memory; of ``auto`` what calibration found, unless the policy takes whole frames."""
        choices = model.bundle.choices()
        tau = choices.append.tau if choices and choices.append else None
        return self.append.for_model(None if self.append.name == AUTO and policy.needs_whole_frames else tau)


def as_policy(policy: str | Policy | type[Policy]) -> Policy:
    """A policy of its name, its class, or itself. Raises UserError for anything else."""
    if isinstance(policy, str):
        return create_policy(FALLBACK if policy == AUTO else policy)
    if isinstance(policy, type) and issubclass(policy, Policy):
        made = policy
        try:
            policy = made()
        except (TypeError, ValueError) as error:  # abstract, or with settings that have no default
            raise UserError(f"policy {made.__name__}: {error}; give one that is made already") from None
    if not isinstance(policy, Policy):
        raise UserError(f"a policy is a name, a subclass of Policy or an instance of one, not {policy!r}")
    return policy


def check_store(policy: Policy, store: StoreSettings | None) -> None:
    """Refuse settings of a store for a policy that has none."""
    if store is not None and not isinstance(policy, Retrieval):
        raise UserError(f"{policy.name} retrieves nothing that it has evicted: leave out --store-bytes and --host-bytes")


def open_store(model: Model, policy: Policy, writer: SnapshotWriter | None, settings: StoreSettings) -> Store:
    """In the writer's directory, or a temporary file. A file that no snapshot tells the blocks of is begun anew."""
    if writer is None:
        return Store(TEMPORARY, settings=settings)
    if writer.folder is None:
        raise UserError(f"{policy.name} keeps a file beside its snapshots: with it, --state is a folder and no address")
    path = writer.folder / STORE
    if not snapshots(writer.folder):
        path.unlink(missing_ok=True)
    return Store(path, f"{model_hash(model.bundle)} {policy_text(policy)}", settings)
