"""The work that exhaust.py disturbs: what makes it, what does it, and what must hold of it afterwards."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

USUAL = ("resumed from", "overwriting the oldest clusters")  # notices that also appear without a fault
Tell = Callable[[str, Any], Any]


def noticed(tell: Tell) -> Callable[[str], Any]:
    return lambda line: tell("usual" if any(part in line for part in USUAL) else "said", line)


@dataclass
class Run:
    """How it ended: done, refused (one line), killed, hang, or failed; ``told``: what it said of itself, and of what."""

    end: str = ""
    status: int = 0
    told: list[tuple[str, Any]] = field(default_factory=list)

    def of(self, word: str) -> list[Any]:
        return [value for found, value in self.told if found == word]

    @property
    def silent(self) -> bool:
        """Whether it ended as if nothing had been."""
        return self.end == "done" and not self.of("said")


@dataclass(frozen=True)
class Work:
    """prepare: makes what is there before, in ``folder / "disk"``, and beside it what is to be known of it. do: the work, in
    a copy. check: asserts what must hold of that copy afterwards, once nothing fails any more.
    """

    prepare: Callable[[Path], Any]
    do: Callable[[Path, Tell], Any]
    check: Callable[[Path, Run], Any]


# sessions

CHUNK = 5
QUESTION = "how many objects are there now?"


def opened(folder: Path, policy: str, notify: Callable[[str], Any]) -> Any:
    from edgevlm.runtime.session import Session
    from edgevlm.runtime.snapshots import SnapshotWriter

    limits = {} if policy == "last-seen" else {"store_bytes": 4_000_000, "host_bytes": 1_000_000}
    state = SnapshotWriter(folder, every=3600, notify=notify)
    session = Session.open("demo", policy=policy, budget=128, chunk=CHUNK, state=state, append="all", encode="all", **limits)
    session.notify = notify
    return session


def watch(session: Any, last: int) -> None:
    while (number := session.stats.frames) < last:
        session.watch(np.random.default_rng(number).integers(0, 255, (56, 56, 3), np.uint8))


def held(session: Any) -> str:
    """A digest of all rows on the device: the same for the same frames."""
    cache = session.cache
    parts = [part for layer in range(cache.layers) for part in cache.held(layer).values()]
    return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()


def logits(session: Any) -> list[float]:
    """Of an answer's first token."""
    found: list[list[float]] = []
    session.ask(QUESTION, max_tokens=1, logits_processor=lambda ids, row: found.append(row.tolist()) or row).wait()
    return found[0]


def lost(session: Any) -> int:
    session.flush()  # its turn comes once all before it has been counted
    return 0 if session.store is None else session.store.stats.lost


def session_work(policy: str, older: int, newer: int, whole: int) -> Work:
    """Resume a stream and go on with it: the frames of its two generations, and of all of it."""

    def prepare(folder: Path) -> None:
        expected = {}
        with opened(folder / "whole", policy, print) as session:
            for last in range(0, whole + 1, CHUNK):
                watch(session, last)
                expected[held(session)] = last, logits(session)
        (folder / "expected").write_text(json.dumps(expected))
        for last in (older, newer):
            with opened(folder / "disk", policy, print) as session:
                watch(session, last)

    def do(folder: Path, tell: Tell) -> None:
        with opened(folder / "disk", policy, noticed(tell)) as session:
            tell("begun", (held(session), logits(session), lost(session)))
            watch(session, whole)
            tell("ended", (held(session), logits(session), lost(session)))

    def check(folder: Path, run: Run) -> None:
        expected, said = json.loads((folder / "expected").read_text()), []
        with opened(folder / "disk", policy, said.append) as session:
            now = held(session), logits(session), lost(session)
        before = 0
        for found, answer, gone in (*run.of("begun"), *run.of("ended"), now):
            gone = before = max(before, gone)
            assert found in expected, "a memory that no frames make"
            assert gone or np.allclose(answer, expected[found][1], atol=1e-3), "another answer"
            assert not gone or run.of("said") or said, "clusters are lost and nothing was said"
        for found, *_ in run.of("ended"):
            assert expected[found][0] == whole, "frames are missing"
        frames = expected[now[0]][0]
        assert frames >= (newer if run.end == "killed" else older), f"a good generation is lost: it goes on at {frames}"
        assert frames == whole or not run.silent, f"it goes on at {frames}, and nothing was said"
        names = sorted(path.name for path in (folder / "disk").iterdir() if path.name not in ("lock", "store.bin"))
        assert len(names) <= 2, names
        assert all(name.endswith(".snapshot") for name in names), names

    return Work(prepare, do, check)


# the store alone


def store_work(file_bytes: int) -> Work:
    """wanted: of each block the seeds that its rows are made from."""

    def open_store(folder: Path, notify: Callable[[str], Any]) -> Any:
        from edgevlm.runtime.store import Store, StoreSettings

        return Store(folder / "disk" / "store.bin", "", StoreSettings(file_bytes, 1 << 20), notify, retry_s=0.05)

    def keep(folder: Path, store: Any, wanted: dict[int, list[int]]) -> None:
        """Its state, as a snapshot has it."""
        np.savez(folder / "new.npz", **store.state(), wanted=json.dumps(wanted))
        os.replace(folder / "new.npz", folder / "state.npz")

    def restored(folder: Path, store: Any) -> dict[int, list[int]]:
        state = dict(np.load(folder / "state.npz"))
        wanted = json.loads(str(state.pop("wanted")))
        store.restore(state)
        return {int(number): seeds for number, seeds in wanted.items()}

    def compare(store: Any, wanted: dict[int, list[int]], said: list[str]) -> None:
        from stored import block, same

        from edgevlm.runtime.store import joined

        gone = set(store.lost())
        for number, found in zip(sorted(wanted), store.get(sorted(wanted)), strict=True):
            if found is None:
                gone.add(number)
            else:
                assert same(found, joined([block(seed) for seed in wanted[number]])), f"block {number} is another one"
        assert said or not gone, f"blocks {sorted(gone)} are lost and nothing was said"

    def prepare(folder: Path) -> None:
        from stored import block

        store = open_store(folder, print)
        for seed in range(30):
            store.put(block(seed))
        store.sync()
        keep(folder, store, {number: [number] for number in range(30)})
        store.close()

    def do(folder: Path, tell: Tell) -> None:
        from stored import block

        said: list[str] = []
        store = open_store(folder, lambda line: (said.append(line), noticed(tell)(line)))
        wanted = restored(folder, store)
        for seed in range(30, 45):
            number = store.put(block(seed))
            wanted[number] = [seed]
            if store.append(number - 20, block(1000 + seed)):
                wanted[number - 20].append(1000 + seed)
        store.drop([3, 31])
        del wanted[3], wanted[31]
        compare(store, wanted, said)
        store.sync()
        keep(folder, store, wanted)
        store.close()

    def check(folder: Path, run: Run) -> None:
        said = [*run.of("said"), *run.of("usual")]
        store = open_store(folder, said.append)
        compare(store, restored(folder, store), said)
        store.close()

    return Work(prepare, do, check)


# the extension alone


def do_kernels(folder: Path, tell: Tell) -> None:
    """Calls on a cache; where one has no memory, it is made again, and returns what it should."""
    from edgevlm.runtime import kernels
    from edgevlm.runtime.cache import Kind, KVCache, Rows
    from edgevlm.runtime.engine import arrays_of

    heads, rows, size, random = 2, 60, 16, np.random.default_rng(0)

    def again(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except MemoryError as error:
            tell("said", str(error))
            return call()

    cache = again(lambda: KVCache(2, heads, size, 2 * rows, inv_freq=1 / 1e4 ** (np.arange(size // 2) / 8)))
    position = np.arange(rows, dtype=np.int32)[:, None]
    again(lambda: cache.reserve(rows))
    for part in (part for buffer in cache.buffers() for part in arrays_of(buffer)):
        part[...] = random.normal(size=part.shape)
    again(lambda: cache.commit(Rows.text(position, Kind.VISION)))
    found = []
    for turn in range(3):
        keep = np.repeat(random.random((1, cache.lengths[0])) < 0.8, heads, 0)
        found += [again(lambda: cache.evict([keep, keep])), again(lambda: cache.reindex(0))]  # noqa: B023
        found += [again(lambda: part(layer)).copy() for layer in range(2) for part in (cache.key, cache.value, cache.position)]  # noqa: B023
        held = again(lambda: cache.seq(0))
        score = random.random(held.shape).astype(np.float32)
        found.append(again(lambda: kernels.top_k(score, held, np.ones(held.shape, np.bool_), 9 + turn)))  # noqa: B023
        found.append(again(lambda: kernels.value_norms(cache.value(0))))
    tell("found", hashlib.sha256(repr([np.asarray(each).tolist() for each in found]).encode()).hexdigest())


def check_kernels(folder: Path, run: Run) -> None:
    clean: list[Any] = []
    do_kernels(folder, lambda word, what: clean.append(what))
    assert run.end != "done" or run.of("found") == clean, "another result"


# bundles


def files_of(bundle: Path) -> dict[str, str]:
    from edgevlm.runtime.bundle import Bundle

    return {name: record.sha256 for name, record in Bundle.load(bundle).files.items()}


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def prepare_export(folder: Path) -> None:
    from checkpoints import make_checkpoint

    from edgevlm.export import export_checkpoint

    for seed in (1, 0):
        make_checkpoint(folder / "disk" / "checkpoint", "llava", layers=2, heads=6, kv_heads=2, seed=seed)
        export_checkpoint(folder / "disk" / "checkpoint", folder / str(seed))
    shutil.copytree(folder / "1", folder / "disk" / "bundle")


def do_export(folder: Path, tell: Tell) -> None:
    from edgevlm.export import export_checkpoint

    export_checkpoint(folder / "disk" / "checkpoint", folder / "disk" / "bundle", force=True)


def check_export(folder: Path, run: Run) -> None:
    old, new = files_of(folder / "1"), files_of(folder / "0")
    found = files_of(folder / "disk" / "bundle")
    assert found == new or (found == old and run.end != "done"), "neither the old bundle nor the new one"
    if run.end != "done" or leftovers(folder / "disk"):
        do_export(folder, lambda *_: None)
        assert files_of(folder / "disk" / "bundle") == new, "the same command does not go on from there"
    assert leftovers(folder / "disk") == []


def prepare_calibration(folder: Path) -> None:
    from edgevlm.runtime.model import demo_bundle

    shutil.copytree(demo_bundle(), folder / "disk" / "bundle")


def do_calibration(folder: Path, tell: Tell) -> None:
    """Of one clip, with one policy: more make the same calls again."""
    from edgevlm.apps import calibrate as module

    module.DEMO_SEEDS = (101,)
    comparison = module.parse_comparison("uniform", "64", (QUESTION,))
    request = module.CalibrateRequest(str(folder / "disk" / "bundle"), [], 10, None, 1, comparison)
    module.start(request, lambda what: None, lambda line: tell("said", line))


def check_calibration(folder: Path, run: Run) -> None:
    from edgevlm.runtime.bundle import Bundle
    from edgevlm.runtime.model import demo_bundle

    def measured() -> tuple[Any, Any]:
        bundle = Bundle.load(folder / "disk" / "bundle")
        return bundle.calibration(), bundle.choices()

    old = Bundle.load(demo_bundle())
    found = measured()
    assert run.end != "done" or found[0] != old.calibration(), "it ended, and nothing is written"
    if run.end != "done" or leftovers(folder / "disk"):
        assert found[0] == old.calibration() or found[0].frames == (10,), "neither the old calibration nor the new one"
        do_calibration(folder, lambda *_: None)
        found = measured()
    assert found[0].frames == (10,)
    assert found[1] is not None
    assert leftovers(folder / "disk") == []


# events, and the journal in words

EVENTS = 3


class Sink:
    """Notes the ids of events in a file outside."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "sent", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def send(self, event: Any, pictures: Any) -> None:
        os.write(self._file, event.id.encode() + b"\n")

    def start(self) -> None: ...
    def announce(self, watches: Any) -> None: ...
    def control(self, *_: Any) -> None: ...
    def close(self) -> None:
        os.close(self._file)


def event_of(number: int) -> Any:
    from edgevlm.apps.watches.events import WatchEvent

    return WatchEvent("door", "parcel", "open", 1e9 - number, 0.9, float(number))


def deliver(folder: Path, numbers: Iterable[int], notify: Callable[[str], Any], acknowledge: Callable[[int], Any]) -> Any:
    """Record events and deliver what there is; returns the ids of those that the file has."""
    from edgevlm.apps.watches import delivery as module
    from edgevlm.apps.watches.events import EventStore

    module.FIRST_S = 0.01
    store = EventStore(folder / "disk", notify, days=1e6)
    delivery = module.Delivery(store, {"sink": Sink(folder)}, notify)
    for number in numbers:
        delivery.record(event_of(number), [bytes(5000)])
        acknowledge(number)
    delivery.close()
    found = {event.id for event in store.query()}
    store.close()
    return found


def prepare_outbox(folder: Path) -> None:
    deliver(folder, range(EVENTS), print, print)
    (folder / "sent").unlink()
    from edgevlm.apps.watches.events import EventStore

    store = EventStore(folder / "disk", days=1e6)
    for number in range(EVENTS, 2 * EVENTS):  # that the one before could not send
        store.record(event_of(number), [bytes(5000)], ["sink"])
    store.close()


def do_outbox(folder: Path, tell: Tell) -> None:
    deliver(folder, range(2 * EVENTS, 3 * EVENTS), lambda line: tell("said", line), lambda number: tell("recorded", number))


def check_outbox(folder: Path, run: Run) -> None:
    said: list[str] = []
    found = deliver(folder, [], said.append, print)
    assert not said, said
    numbers = {event_of(number).id: number for number in range(3 * EVENTS)}
    sent = [numbers[line] for line in (folder / "sent").read_text().split()]
    recorded = [*range(2 * EVENTS), *run.of("recorded")]
    missing = [number for number in recorded if event_of(number).id not in found]
    assert not missing or run.of("said"), f"events {missing} are gone and nothing was said"
    assert not missing or min(missing) >= 2 * EVENTS, f"events {missing}, which were there before, are gone"
    unsent = [number for number in recorded if number >= EVENTS and number not in sent]
    assert not unsent or any("are lost" in line for line in run.of("said")), f"events {unsent} are not sent"
    first = list(dict.fromkeys(sent))
    assert first == sorted(first) or run.of("said"), f"out of order: {sent}"


def lines_of(folder: Path, numbers: Iterable[int], notify: Callable[[str], Any], acknowledge: Callable[[int], Any]) -> Any:
    from edgevlm.apps.journal import Journal, Line

    journal = Journal(folder / "disk", notify, days=1e6)
    for number in numbers:
        journal.add(Line("door", 1e9 + number, f"line {number}"))
        acknowledge(number)
    found = [line.text for line in journal.query("line")]
    journal.close()
    return found


def do_journal(folder: Path, tell: Tell) -> None:
    lines_of(folder, range(EVENTS, 2 * EVENTS), lambda line: tell("said", line), lambda number: tell("written", number))


def check_journal(folder: Path, run: Run) -> None:
    said: list[str] = []
    found = lines_of(folder, [], said.append, print)
    assert not said, said
    missing = [number for number in (*range(EVENTS), *run.of("written")) if f"line {number}" not in found]
    assert not missing or min(missing) >= EVENTS, f"lines {missing}, which were there before, are gone"
    assert not missing or run.of("said"), f"lines {missing} are gone and nothing was said"


WORKS = {
    "snapshot": session_work("last-seen", 10, 20, 30),
    "retrieval": session_work("hybrid:tau=0.6", 5, 10, 15),  # few clusters, whose tokens come and go
    "store": store_work(8 << 20),
    "ring": store_work(3 << 20),
    "kernels": Work(lambda folder: None, do_kernels, check_kernels),
    "export": Work(prepare_export, do_export, check_export),
    "calibration": Work(prepare_calibration, do_calibration, check_calibration),
    "outbox": Work(prepare_outbox, do_outbox, check_outbox),
    "journal": Work(lambda folder: lines_of(folder, range(EVENTS), print, print), do_journal, check_journal),
}
