"""Build a session's stream from its settings, and choose what the settings leave to ``auto``."""

from __future__ import annotations

import numpy as np

from edgevlm.errors import UserError
from edgevlm.runtime.budget import TextBudget, default_budget, present_rows
from edgevlm.runtime.bundle import Bundle
from edgevlm.runtime.calibration import Choice, Choices
from edgevlm.runtime.changes import ChangedEncoder
from edgevlm.runtime.chat import Chat
from edgevlm.runtime.model import Model
from edgevlm.runtime.plugins import blamed
from edgevlm.runtime.policies import Policy, as_policy, create_policy, evicting
from edgevlm.runtime.policies.retrieval import Retrieval
from edgevlm.runtime.settings import ALL, AUTO, CHANGED, TAU, AppendChanged, SessionSettings, parse_append, parse_encode
from edgevlm.runtime.snapshots.directory import OTHER, snapshots
from edgevlm.runtime.snapshots.writer import SnapshotWriter, model_hash, policy_text
from edgevlm.runtime.store import Store, StoreSettings
from edgevlm.runtime.store.file import TEMPORARY, OtherStore
from edgevlm.runtime.stream import Stream

FALLBACK = "infinipot-v"  # the policy that ``auto`` chooses if calibration found no better one
FAR = 2.0
STORE = "store.bin"
FEW = 64  # up to this many patches, encoding a whole frame is faster than comparing patches
LATEST_S = 1e12


def check_int(**numbers: object) -> None:
    """Raise UserError unless each argument is an integer or None."""
    for name, number in numbers.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, int | np.integer)):
            raise UserError(f"{name} must be an integer, not {number!r}")


def check_time(timestamp: object) -> None:
    """Raise UserError unless a timestamp is a number of seconds below LATEST_S."""
    number = isinstance(timestamp, int | float | np.integer | np.floating) and not isinstance(timestamp, bool)
    if not number or not -LATEST_S < timestamp < LATEST_S:  # type: ignore[operator]
        raise UserError(f"timestamp must be a number of seconds, not {str(timestamp)[:40]}")


def open_encoder(settings: SessionSettings, model: Model, writer: SnapshotWriter | None) -> ChangedEncoder | None:
    """Return the encoder of changed patches, or None if whole frames are encoded.

    ``auto`` uses what calibration chose. Without a calibrated choice, ``auto`` encodes changed patches if the engine can and
    frames have more than FEW patches. The tower's cache must also fit in a quarter of the free memory. A stream that continues
    from a snapshot keeps the snapshot's setting. Raises UserError if ``changed`` was requested but is not possible.
    """
    (name, changed), copies = parse_encode(settings.encode), 1 if writer is None else 2
    if name == CHANGED:
        return ChangedEncoder(model.engine, model.bundle, changed, copies)
    choices = model.bundle.choices()
    found = choices.encode if choices else None
    kept = writer.kept(model.bundle).get("encode") if writer else None
    patches = model.bundle.vision.changed.patches if model.bundle.vision.changed else 0
    if name == ALL or kept == ALL or (patches <= FEW if found is None else not found.setting):
        return None
    if found and found.setting:
        changed = parse_encode(found.setting)[1]
    try:
        return ChangedEncoder(model.engine, model.bundle, changed, copies if kept else 4 * copies)
    except UserError:
        return None


def open_stream(
    settings: SessionSettings, model: Model, chat: Chat, text: TextBudget, writer: SnapshotWriter | None
) -> tuple[Stream, str]:
    """Open a stream and append its prefix. Returns the stream, and a line about the choices of ``auto``.

    ``writer``: writes the snapshots; its directory also holds the store's file. Raises the same errors as ``Session.open``.
    """
    policy = as_policy(FALLBACK if settings.policy == AUTO else settings.policy)
    prefix, rows, budget, why = chat.prefix, text.rows(model), settings.budget, ""
    if budget is None:
        append = _append(settings, model, policy, writer)
        present = 0 if append is None else present_rows(model, append.present)
        budget = default_budget(model, policy, model.bundle.limit - len(prefix) - rows - present)
    assert isinstance(budget, int), "settings are checked"
    if settings.policy == AUTO:
        policy, why = chosen_policy(model.bundle, budget)
    append = _append(settings, model, policy, writer)
    choices = model.bundle.choices()
    if why and append is not None and settings.append == AUTO and choices and choices.append:
        why += f"; append: {append}"
    store = open_store(model, policy, writer, settings)
    try:
        with blamed(f"policy {policy.name}", policy):
            stream = Stream(
                model, policy, budget, prefix, rows, settings.reindexing, settings.chunk, writer is not None, store, append
            )
        return stream, why
    except BaseException:
        if store is not None:
            store.close()
        raise


def _append(settings: SessionSettings, model: Model, policy: Policy, writer: SnapshotWriter | None) -> AppendChanged | None:
    """Return the settings of ``--append changed``, or None if all tokens of each frame enter the memory.

    ``auto`` appends changed tokens, unless calibration chose whole frames or the policy needs whole frames. If a snapshot was
    made with whole frames, ``auto`` keeps appending whole frames.
    """
    choices, (name, tau, refresh, present) = model.bundle.choices(), parse_append(settings.append)
    if name == AUTO and writer is not None and writer.kept(model.bundle).get("append") == ALL:
        return None
    calibrated = choices.append.tau if choices and choices.append else TAU
    if name == ALL or (name == AUTO and (calibrated is None or policy.needs_whole_frames)):
        return None
    return AppendChanged(tau or calibrated or TAU, refresh, present)


def open_store(model: Model, policy: Policy, writer: SnapshotWriter | None, settings: SessionSettings) -> Store | None:
    """Open a retrieval policy's store in the writer's directory or a temporary file; return None for other policies.

    Deletes an old store file if there are no snapshots. Raises UserError for store settings if the policy has no store.
    """
    given = {"file_bytes": settings.store_bytes, "host_bytes": settings.host_bytes}
    limits = {name: value for name, value in given.items() if isinstance(value, int)}
    if not isinstance(policy, Retrieval):
        if limits:
            raise UserError(f"policy {policy.name} does not retrieve evicted tokens; remove --store-bytes and --host-bytes")
        return None
    if writer is None:
        return Store(TEMPORARY, settings=StoreSettings(**limits))
    if writer.folder is None:
        raise UserError(f"policy {policy.name} keeps a file next to its snapshots; set --state to a folder, not a URL")
    path = writer.folder / STORE
    if not snapshots(writer.folder):
        path.unlink(missing_ok=True)
    owner = f"{model_hash(model.bundle)} {policy_text(policy)}"
    try:
        return Store(path, owner, StoreSettings(**limits))
    except OtherStore:
        if not writer.begins_again(model.bundle, policy):
            raise
        path.replace(path.with_suffix(OTHER))
        return Store(path, owner, StoreSettings(**limits))


def chosen_policy(bundle: Bundle, budget: int) -> tuple[Policy, str]:
    """Return the policy that ``auto`` chooses for this model and budget, and the reason.

    ``budget``: in tokens. The policy is the one that calibration chose at the nearest budget. The policy is FALLBACK if no
    budget was measured, no policy is clearly better, or the chosen policy is not installed. Raises BundleError for invalid
    choices.
    """
    choices, again = bundle.choices(), f"edgevlm calibrate {bundle.path}"
    if not choices:
        why = f"auto: {FALLBACK} at budget {budget}, because no policy was measured on this model ({again})"
        return create_policy(FALLBACK), why
    choice = choices.nearest(budget)
    why = describe(choices, choice, budget, again)
    if missing := [name for name in evicting() if name not in choices.known]:
        why += f"; not compared yet: {', '.join(missing)} ({again})"
    try:
        return create_policy(choice.chosen or FALLBACK), why
    except UserError:
        gone = f"{choice.chosen}, chosen at budget {choice.budget}, is not installed"
        return create_policy(FALLBACK), f"auto: {FALLBACK} at budget {budget}, because {gone}; compare again ({again})"


def describe(choices: Choices, choice: Choice, budget: int, again: str = "edgevlm calibrate") -> str:
    """Describe what ``auto`` chooses for a budget. In the returned text, numbers and warnings follow the first ``; ``."""
    best, on = choice.best, f"on streams of {choices.frames} frames"
    on += "" if choice.budget == budget else f" at budget {choice.budget}"
    if best is None:
        why = f"auto: {FALLBACK} at budget {budget}, because no policy was clearly better {on}"
    else:
        percent = choices.measure == "streamqa"
        value, low, high = ((100 if percent else 1) * number for number in (best.value, best.ci_low, best.ci_high))
        numbers = f"{value:.1f} % of questions correct [{low:.1f}, {high:.1f}]"
        numbers = numbers if percent else f"KL from full KV {value:.3f} nats [{low:.3f}, {high:.3f}]"
        why = f"auto: {best.policy} at budget {budget}, among the best {on}; {numbers}"
    if budget > FAR * choice.budget or choice.budget > FAR * budget:
        why += f"; that budget is far from {budget}: compare again ({again} --budget {budget})"
    return why
