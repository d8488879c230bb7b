"""Sessions over a tiered store: restarts, a damaged file, a disk that fails, and who may not have one."""

import errno
import os

import pytest
from pictures import frames
from retrieval.anything import Anything

from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session, TextBudget
from edgevlm.runtime.snapshots import SnapshotWriter
from edgevlm.runtime.store import file as file_module

TEXT_BUDGET = TextBudget(16, 64, 16)
QUESTION = "how many objects are there now?"
SMALL = {"store_bytes": 64_000_000, "host_bytes": 1_000_000}


@pytest.fixture(scope="module")
def model():
    loaded = Model.load("demo", threads=1)
    yield loaded
    loaded.close()


def opened(model, state=None, store=SMALL, policy=None, said=None):
    writer = None if state is None else SnapshotWriter(state, every=3600, notify=(said if said is not None else []).append)
    budget = 12 * model.bundle.vision.tokens_per_frame
    return Session.open(
        model,
        policy=policy or Anything(share=1),
        budget=budget,
        chunk=2,
        text_budget=TEXT_BUDGET,
        state=writer,
        append="all",
        **(store or {}),
    )


def watch(session, images):
    for image in images:
        session.watch(image)
    session.flush()


def tokens(session):
    answer = session.ask(QUESTION, max_tokens=8)
    answer.wait()
    return answer.token_ids


def test_a_session_goes_on_with_what_lies_below(model, tmp_path):
    pictures = list(frames(40, model))
    with opened(model) as unbroken:
        watch(unbroken, pictures[:30])
        wanted = [tokens(unbroken)]
        watch(unbroken, pictures[30:])
        wanted.append(tokens(unbroken))
        blocks = sum(len(of) for heads in unbroken._stream.policy.blocks for of in heads)
    assert blocks > 50
    with opened(model, tmp_path) as session:
        watch(session, pictures[:30])
        found = [tokens(session)]
    assert (tmp_path / "store.bin").stat().st_size > 100_000
    with opened(model, tmp_path) as session:
        assert session.stats.frames == 30
        assert session.stats.store.stats.lost == 0
        watch(session, pictures[30:])
        found.append(tokens(session))
        assert session.stats.store.stats.reads > 0, "from the file"
    assert found == wanted


def test_a_damaged_store_costs_clusters_and_no_answer(model, tmp_path, caplog):
    with opened(model, tmp_path) as session:
        watch(session, frames(30, model))
    path = tmp_path / "store.bin"
    data = bytearray(path.read_bytes())
    for at in range(5000, len(data), 3000):
        data[at] ^= 1
    path.write_bytes(data)
    with opened(model, tmp_path) as session:
        assert tokens(session)
        watch(session, frames(6, model))
        assert tokens(session)
        store = session.stats.store.stats
        assert store.lost == store.damaged > 10
    assert sum("damaged" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("with_state", [True, False])
def test_a_disk_that_fails_costs_one_notice(model, tmp_path, monkeypatch, with_state):
    said = []

    def pwrite(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with opened(model, tmp_path if with_state else None) as session:
        session.notify = said.append
        watch(session, frames(14, model))
        monkeypatch.setattr(file_module.os, "pwrite", pwrite)
        watch(session, frames(20, model))
        assert tokens(session)
        assert session.stats.frames == 34
        assert len(said) == 1
        assert "the disk is full" in said[0]
        monkeypatch.undo()


def test_without_a_folder_nothing_is_left_behind(model, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with opened(model) as session:
        watch(session, frames(30, model))
        assert session.stats.store.file_bytes > 0
        assert list(tmp_path.iterdir()) == []
