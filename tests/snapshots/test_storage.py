"""Snapshots at an address, on S3 as moto's server plays it, and encrypted: what is read back, refused, and never lost."""

import threading

import numpy as np
import pytest
from buckets import bucket
from served import eventually
from snapshots.test_files import ABOUT, WANTED

from edgevlm.apps.serve.config import check_config
from edgevlm.errors import UserError
from edgevlm.runtime.snapshots.directory import PART_BYTES, SnapshotDirectory, snapshots, verified
from edgevlm.runtime.snapshots.format import Snapshot
from edgevlm.runtime.snapshots.writer import SnapshotWriter

__all__ = ["bucket"]

ARRAYS = {"layer0.key": np.arange(48, dtype=np.float16).reshape(2, 3, 8), "policy.empty": np.zeros((0, 4), np.float32)}
BIG = ARRAYS | {"layer1.key": np.random.default_rng(0).integers(0, 255, PART_BYTES + 3_000_001, np.uint8)}  # parts of an upload


@pytest.fixture
def key():
    pytest.importorskip("pyrage", reason="the extra [encryption] is not installed")
    from edgevlm.runtime.snapshots.directory import SnapshotKey

    return SnapshotKey(SnapshotKey.generate())


@pytest.fixture
def memory():
    import fsspec

    yield "memory://cameras/front"
    fsspec.filesystem("memory").store.clear()


def frames(number):
    return {**ABOUT, "session": {**ABOUT["session"], "frames": number}}


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("kind", ["folder", "memory", "bucket"])
def test_two_generations_are_kept_and_read_back(kind, encrypted, tmp_path, request):
    held = request.getfixturevalue("key") if encrypted else None
    where = str(tmp_path / "state") if kind == "folder" else request.getfixturevalue(kind)
    where = getattr(where, "address", where)
    state = SnapshotDirectory(where, held)
    assert state.resume(WANTED) == (None, [])
    for number in range(3):
        state.write(frames(number), BIG)
    state.close()
    assert [path.name for path in snapshots(where)] == ["00000003.snapshot", "00000002.snapshot"]
    again = SnapshotDirectory(where, held)
    found, refused = again.resume(WANTED)
    assert (found.about["session"]["frames"], refused) == (2, [])
    for name, array in BIG.items():
        np.testing.assert_array_equal(found.arrays[name], array)
    again.write(frames(3), ARRAYS)
    assert [path.name for path in snapshots(where)] == ["00000004.snapshot", "00000003.snapshot"]
    again.close()


def test_nothing_of_a_camera_lies_readable_beside_an_encrypted_snapshot(key, tmp_path):
    state = SnapshotDirectory(tmp_path, key)
    state.write(ABOUT, BIG)
    for path in tmp_path.iterdir():
        raw = path.read_bytes()
        assert b"nobody" not in raw  # a conversation's answer
        assert BIG["layer1.key"].tobytes()[:64] not in raw
    state.close()


def test_age_itself_opens_what_was_written(tmp_path):
    pyrage = pytest.importorskip("pyrage")
    from edgevlm.runtime.snapshots.directory import SnapshotKey

    text = SnapshotKey.generate()
    for folder, held in (("plain", None), ("secret", SnapshotKey(f"# public key: none\n{text}\n"))):
        with_key = SnapshotDirectory(tmp_path / folder, held)
        with_key.write(ABOUT, ARRAYS)
        with_key.close()
    plain, secret = (tmp_path / folder / "00000001.snapshot" for folder in ("plain", "secret"))
    assert pyrage.decrypt(secret.read_bytes(), [pyrage.x25519.Identity.from_str(text)]) == plain.read_bytes()


@pytest.mark.parametrize("harm", ["a byte", "its end"])
def test_a_damaged_generation_is_refused_and_the_other_is_used(key, tmp_path, harm):
    state = SnapshotDirectory(tmp_path, key)
    for number in range(2):
        state.write(frames(number), ARRAYS)
    newest = snapshots(tmp_path)[0]
    raw = bytearray(newest.read_bytes())
    raw[-40] ^= 1
    newest.write_bytes(raw if harm == "a byte" else raw[:-70])
    found, refused = state.resume(WANTED)
    assert found.about["session"]["frames"] == 0
    assert [line.partition("(")[0] for line in refused] == ["00000002.snapshot is damaged or incomplete "]
    state.close()


def test_without_its_key_a_memory_is_neither_read_nor_written_over(key, tmp_path):
    state = SnapshotDirectory(tmp_path, key)
    state.write(ABOUT, ARRAYS)
    state.close()
    before = snapshots(tmp_path)[0].read_bytes()
    for held, says in ((None, "is encrypted; add its key"), (type(key)(type(key).generate()), "encrypted with another key")):
        other = SnapshotDirectory(tmp_path, held)
        with pytest.raises(UserError, match=says):
            other.resume(WANTED)
        other.close()
    assert snapshots(tmp_path)[0].read_bytes() == before


def test_one_that_was_not_encrypted_is_gone_on_from_with_a_key(key, tmp_path):
    state = SnapshotDirectory(tmp_path)
    state.write(frames(7), ARRAYS)
    state.close()
    state = SnapshotDirectory(tmp_path, key)
    assert state.resume(WANTED)[0].about["session"]["frames"] == 7
    state.close()


def test_what_is_no_key_is_one_line_without_it():
    pytest.importorskip("pyrage")
    from edgevlm.runtime.snapshots.directory import SnapshotKey

    for text in ("", "hunter2-hunter2", "AGE-SECRET-KEY-1SECRET"):
        with pytest.raises(UserError, match="is not an age key; create one with edgevlm state key FILE") as raised:
            SnapshotKey(text)
        assert not text or text not in str(raised.value)


def test_an_upload_that_breaks_off_leaves_what_was_there(bucket, monkeypatch):
    state = SnapshotDirectory(bucket.address)
    state.write(frames(0), ARRAYS)

    def torn(about, arrays):
        yield b"half of it"
        raise OSError("the line went dead")

    with monkeypatch.context() as patched:
        patched.setattr("edgevlm.runtime.snapshots.directory.parts", torn)
        with pytest.raises(OSError, match="went dead"):
            state.write(frames(1), ARRAYS)
    assert [path.name for path in snapshots(bucket.address)] == ["00000001.snapshot"]
    state.write(frames(2), ARRAYS)
    assert [isinstance(found, Snapshot) for _, found in verified(bucket.address)] == [True, True]


def test_a_process_that_another_has_overtaken_writes_no_more(memory):
    """It may have been frozen meanwhile: where there is no lock, the numbers tell."""
    earlier = SnapshotDirectory(memory)
    earlier.write(frames(1), ARRAYS)
    later = SnapshotDirectory(memory)
    assert later.resume(WANTED)[0].about["session"]["frames"] == 1
    later.write(frames(2), ARRAYS)
    with pytest.raises(UserError, match="another process has written a newer snapshot"):
        earlier.write(frames(3), ARRAYS)
    assert [found.about["session"]["frames"] for _, found in verified(memory)] == [2, 1]


class Recording:
    """A session whose frames are counted; a thread of its own is never held up by a snapshot."""

    store = None

    def __init__(self):
        self._version = 0

    def _capture(self, buffer):
        return {key: ABOUT[key] for key in ("session", "stream", "chunk")}, buffer.copy(ARRAYS), 0.0


def test_a_store_that_is_away_is_told_of_once_and_tried_again(bucket):
    said, failed, again = [], threading.Event(), threading.Event()

    def notify(line):
        said.append(line)
        (again if "resumed" in line else failed).set()

    writer, session = SnapshotWriter(bucket.address, every=0.2, notify=notify), Recording()
    writer.attach(session, WANTED, 1 << 16, lambda snapshot: None)
    bucket.go_away()
    writer.start()
    session._version += 1
    assert failed.wait(60)
    bucket.begin()
    assert again.wait(60)
    writer.close()
    assert [line.partition(" (")[0] for line in said] == [
        f"cannot write a snapshot to {bucket.address}", "writing snapshots resumed"
    ]  # fmt: skip
    assert "the stream continues; retrying every 0.2 s" in said[0]
    assert "testing-secret" not in " ".join(said)
    assert len(list(verified(bucket.address))) >= 1


def test_an_address_that_nobody_knows_is_one_line_without_its_password():
    with pytest.raises(UserError, match=r"--state gopher://\*\*\*@host/x: ") as raised:
        SnapshotDirectory("gopher://me:hunter2@host/x")
    assert "hunter2" not in str(raised.value)


def test_a_servers_snapshots_at_an_address_are_encrypted_resumed_and_forgotten(memory, tmp_path):
    pytest.importorskip("fastapi")
    pytest.importorskip("pyrage", reason="the extra [encryption] is not installed")
    from edgevlm.apps.run.clock import Span
    from edgevlm.apps.serve.service import Service
    from edgevlm.runtime.snapshots.directory import SnapshotKey

    key = SnapshotKey.generate()
    (tmp_path / "key").write_text(key)
    settings = {
        "state": str(tmp_path / "state"), "snapshots": memory, "state_every": 0.2, "fps": 20.0,
        "state_key": f"file:{tmp_path / 'key'}", "cameras": {"hall": {"source": "demo"}},
    }  # fmt: skip
    told: list[str] = []

    def opened():
        service = Service(check_config(settings, "here"), told.append)
        service.open()
        eventually(lambda: service.stream("hall").session.stats.frames >= 16)
        return service

    opened().close()
    where = f"{memory}/hall"
    assert all(isinstance(found, Snapshot) for _, found in verified(where, SnapshotKey(key)))
    assert "is encrypted" in str(next(verified(where))[1])
    assert not list((tmp_path / "state").rglob("*.snapshot"))
    service = opened()
    assert any("resumed from" in line for line in told)
    service.forget("hall", Span())
    assert service.stream("hall").session.stats.frames < 16, "an empty memory"
    eventually(lambda: len(snapshots(where)) == 2)
    service.remove("hall")
    assert service.forget("hall", Span())["hall"]["snapshots"] == 2
    service.close()
    assert not snapshots(where)
