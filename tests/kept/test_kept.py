"""What earlier releases left on disks: each opens, or starting a new stream beside it. ``make.py`` writes the archives."""

import sys
import tarfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from edgevlm.apps.forget import forget_camera
from edgevlm.apps.journal import Journal
from edgevlm.apps.run.clock import Span
from edgevlm.apps.serve.config import check_config, read_toml
from edgevlm.apps.serve.service import Service
from edgevlm.apps.watches.events import EventStore
from edgevlm.runtime.session import Session
from edgevlm.runtime.snapshots import SnapshotWriter

RELEASES = sorted(Path(__file__).parent.glob("*.tar.xz"))
POLICIES = {"evicted": ("infinipot-v", 16), "stored": ("rekv", 32)}
FRAMES = 12


@pytest.fixture(params=RELEASES, ids=lambda path: path.name.removesuffix(".tar.xz"))
def left(request, tmp_path):
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, **({"filter": "data"} if sys.version_info >= (3, 12) else {}))
    return tmp_path


def opened(left, name, said):
    policy, budget = POLICIES[name]
    state = SnapshotWriter(left / name, notify=said.append)
    return Session.open(left / "bundle", policy=policy, budget=budget, chunk=1, state=state)


@pytest.mark.parametrize("name", POLICIES)
def test_a_memory_outlives_an_upgrade(left, name):
    said = []
    with opened(left, name, said) as session:
        assert (session.stats.frames, session.time_s) == (FRAMES, FRAMES - 1)
        assert session.stats.tokens > 0
        if name == "stored":
            assert session.stats.store.stats.lost == 0
        assert session.ask("how many are there now?", max_tokens=2).evidence is not None
    assert len(said) == 1


def test_events_journal_and_configuration_outlive_an_upgrade(left):
    with closing(EventStore(left)) as events, closing(Journal(left)) as journal:
        event, pictures = events.next("phone")
        assert (event.watch, pictures, events.waiting()) == ("parcel", [b"\xff\xd8 a picture"], {"phone": 1})
        assert [line.text for line in journal.query("parcel")] == ["somebody brought a parcel"]
    config = check_config(read_toml(left / "edgevlm.toml"), "edgevlm.toml")
    assert config.cameras["door"].budget == 1000
    assert config.watches[0].schedule


@pytest.mark.parametrize("name", POLICIES)
def test_beside_the_state_of_another_version_a_stream_begins(left, name, monkeypatch):
    before, said = {path.stem: path.read_bytes() for path in (left / name).iterdir() if path.suffix}, []
    monkeypatch.setattr("edgevlm.runtime.snapshots.writer.LATER", ())  # a version that hashes other fields
    with opened(left, name, said) as session:
        session.watch(np.zeros((28, 28, 3), np.uint8))
    assert "another model" in said[0]
    assert "starting a new stream" in said[1]
    assert {path.stem: path.read_bytes() for path in (left / name).glob("*.other")} == before
    with opened(left, name, []) as session:
        assert session.stats.frames == 1
    for path in (left / name).glob("*.snapshot"):  # a stream that was killed before its first one
        path.unlink()
    forget_camera(left / name, Span(since=0.0))
    assert not list((left / name).glob("*.other"))


def test_a_server_begins_again_beside_the_state_of_other_settings(left):
    said, camera = [], {"source": "demo", "model": str(left / "bundle"), "policy": "infinipot-v", "budget": 20}
    config = check_config({"cameras": {"evicted": camera}, "state": str(left)}, "test")
    with closing(Service(config, said.append)) as service:
        service.open()
        assert service.stream("evicted").session.stats.frames < FRAMES
    assert "written with budget 16, but this run uses 20" in said[0]
    assert len(list((left / "evicted").glob("*.other"))) == 1
