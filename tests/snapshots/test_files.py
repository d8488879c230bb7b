"""The file of a snapshot and the folder of two: every byte is checked, every failure leaves the good one."""

import errno
import json
import os
import re
import struct
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgevlm import __version__
from edgevlm.errors import SnapshotError, UserError
from edgevlm.runtime.snapshots.directory import Folder, SnapshotDirectory, read_at, verified
from edgevlm.runtime.snapshots.format import FORMAT, MAGIC, PREAMBLE, Snapshot, padding, parts

ARRAYS = {
    "layer0.key": np.arange(48, dtype=np.float16).reshape(2, 3, 8),
    "layer0.seq": np.arange(6).reshape(2, 3),
    "empty": np.zeros((0, 4), np.float32),
    "flags": np.array([True, False, True]),
    "bytes": np.frombuffer(b"Question: \xc3\xa4?", np.uint8),
}
WANTED = {"model": "abc", "name": "shop", "policy": "uniform", "budget": 8, "dtype": "fp32", "chunk": 8, "reindexing": "lazy"}
SESSION = {"frames": 3, "chunks": 0, "time_s": 1.5, "conversations": {"talk": [["who?", "nobody"]]}}
ABOUT = {
    "edgevlm": __version__, "written": 0.0, "source": "wh\u00e4t \U0001f600", "identity": WANTED, "session": SESSION,
    "stream": {"positions": [3, None, 0, 0.0, None], "seq": 3, "frames": 3, "stats": {}}, "chunk": {"taken": 0, "encoded": 0},
}  # fmt: skip


def read(path):
    return read_at(Folder(path.parent), path)


def written(path, about=ABOUT, arrays=ARRAYS):
    with path.open("wb") as stream:
        size = sum(map(stream.write, parts(about, arrays)))
    assert size == path.stat().st_size
    return path


def test_it_reads_what_was_written(tmp_path):
    found = read(written(tmp_path / "a"))
    assert {name: found.about[name] for name in ABOUT} == ABOUT
    assert list(found.arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert found.arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(found.arrays[name], array)
        assert not found.arrays[name].flags.writeable
    assert read(written(tmp_path / "b", arrays={})).arrays == {}


def test_the_layout_is_the_documented_one(tmp_path):
    """Read by hand, as docs/internals/snapshots.md says, without the module."""
    raw = written(tmp_path / "a").read_bytes()
    magic, version, checksum, start = struct.unpack_from("<8sIIQ", raw)
    assert (magic, version, start % 64) == (b"EDGEVLM\x1a", FORMAT, 0)
    assert crc32(raw[:12] + bytes(4) + raw[16:start]) == checksum
    header = json.loads(raw[24:start])
    assert start + header["bytes"] == len(raw)
    ends = [*(section[3] for section in header["sections"][1:]), header["bytes"]]
    for (name, dtype, shape, offset, checksum), end in zip(header["sections"], ends, strict=True):
        assert offset % 64 == 0
        assert crc32(raw[start + offset : start + end]) == checksum
        array = np.frombuffer(raw, dtype, int(np.prod(shape)), start + offset).reshape(shape)
        np.testing.assert_array_equal(array, ARRAYS[name])


@given(at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_no_bit_can_flip_unnoticed(tmp_path_factory, at, bit):
    path = written(tmp_path_factory.getbasetemp() / "flipped")
    raw = bytearray(path.read_bytes())
    raw[at % len(raw)] ^= 1 << bit
    path.write_bytes(raw)
    with pytest.raises(SnapshotError, match=r"is damaged|has the wrong size|is not a snapshot|has snapshot format"):
        read(path)


@given(share=st.floats(0, 1, exclude_max=True))
def test_no_torn_end_goes_unnoticed(tmp_path_factory, share):
    path = written(tmp_path_factory.getbasetemp() / "torn")
    raw = path.read_bytes()
    path.write_bytes(raw[: int(share * len(raw))])
    with pytest.raises(SnapshotError, match=r"has the wrong size|is damaged|is not a snapshot"):
        read(path)
    path.write_bytes(raw + b"\0")
    with pytest.raises(SnapshotError, match="has the wrong size"):
        read(path)


LARGE = f"[0, {1 << 47}, {1 << 47}], 0, 0".encode()  # of no bytes; numpy has a limit for the product of the rest


@pytest.mark.parametrize("new", [b'"|O", [8]', b'"|S8", [8]', b'"<M8", [8]', b'"<i8", ' + LARGE])
def test_only_numbers_are_read(tmp_path, new):
    """A file that asks for objects, or for what numpy refuses, its checksums right, makes none."""
    path = written(tmp_path / "a", arrays={"x": np.arange(8)})
    text = path.read_bytes()
    start = PREAMBLE.unpack_from(text)[3]
    old = rb'"<i8", \[8\]' + (rb", \d+, \d+" if new.endswith(LARGE) else b"")
    body, count = re.subn(old, new, text[PREAMBLE.size : start].strip())
    assert count == 1
    rest, start = text[start:], PREAMBLE.size + len(body) + padding(PREAMBLE.size + len(body))
    body = body.ljust(start - PREAMBLE.size, b" ")
    head = PREAMBLE.pack(MAGIC, FORMAT, crc32(body, crc32(PREAMBLE.pack(MAGIC, FORMAT, 0, start))), start)
    path.write_bytes(head + body + rest)
    with pytest.raises(SnapshotError, match="has an invalid"):
        read(path)


def test_one_of_a_newer_edgevlm_is_not_written_over(tmp_path):
    raw = written(tmp_path / "00000001.snapshot").read_bytes()
    newer = tmp_path / "00000002.snapshot"
    newer.write_bytes(PREAMBLE.pack(MAGIC, FORMAT + 1, *PREAMBLE.unpack_from(raw)[2:]) + raw[PREAMBLE.size :])
    state = SnapshotDirectory(tmp_path)
    found, refused = state.resume(WANTED)
    assert found.path.name == "00000001.snapshot"
    assert "upgrade edgevlm" in refused[0]
    found.path.unlink()
    before = newer.read_bytes()
    assert state.resume(WANTED)[0] is None
    state.write(ABOUT, ARRAYS)
    assert newer.with_suffix(".other").read_bytes() == before
    state.close()


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_a_write_that_fails_changes_nothing_and_the_next_one_works(tmp_path, monkeypatch, call):
    state = SnapshotDirectory(tmp_path)
    state.write(ABOUT, ARRAYS)

    def fails(*arguments, **settings):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, fails)
        with pytest.raises(OSError, match="No space"):
            state.write(ABOUT, ARRAYS)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["00000001.snapshot", "lock"]
    state.write(ABOUT, ARRAYS)
    assert [isinstance(found, Snapshot) for _, found in verified(tmp_path)] == [True, True]
    state.close()


def test_what_a_killed_process_left_is_removed_and_strangers_stay(tmp_path):
    (tmp_path / "00000009.snapshot.unfinished").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "my.snapshot").write_text("mine too")
    state = SnapshotDirectory(tmp_path)
    for _ in range(3):
        state.write(ABOUT, ARRAYS)
    state.close()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"notes.txt", "my.snapshot", "lock", "00000002.snapshot", "00000003.snapshot"}


def test_a_link_that_somebody_put_there_is_not_followed(tmp_path):
    other, state = tmp_path / "other", tmp_path / "state"
    state.mkdir()
    (state / "lock").symlink_to(other)
    with pytest.raises(UserError, match="cannot be written"):
        SnapshotDirectory(state)
    (state / "lock").unlink()
    directory = SnapshotDirectory(state)
    (state / "00000001.snapshot.unfinished").symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        directory.write(ABOUT, ARRAYS)
    directory.close()
    assert not other.exists()
