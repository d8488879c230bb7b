"""JSON lines that a stopped run continues, whatever byte it was killed at."""

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from edgevlm.apps.journal import Journal
from edgevlm.errors import UserError
from edgevlm.runtime.files import JsonLines, atomic_write
from edgevlm.runtime.snapshots.directory import SnapshotDirectory
from edgevlm.runtime.store.file import StoreFile

HEADER = {"journal": "measurements", "seed": "0", "frames": 64}


def key_of(record):
    return record["stream"]


def opened(path, **options):
    return JsonLines(path, HEADER, key_of, **options)


def test_records_are_there_again(tmp_path):
    path = tmp_path / "run.jsonl"
    with opened(path, resume=False) as lines:
        lines.add({"stream": 0})
        assert len(path.read_text().splitlines()) == 2, "on disk at once"
        lines.add({"stream": 1, "tokens": 7})
        with pytest.raises(UserError, match="another process"):
            opened(path)
    with opened(path) as lines:
        assert lines.records == {0: {"stream": 0}, 1: {"stream": 1, "tokens": 7}}
    with pytest.raises(UserError, match="already exists; add --resume"):
        opened(path, resume=False)


def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path):
    path = tmp_path / "run.jsonl"
    with opened(path) as lines:
        lines.add({"stream": 0})
    kept, last = path.read_bytes(), json.dumps({"stream": 1}).encode()
    for left in range(1, len(last) + 1):
        path.write_bytes(kept + last[:left])
        with opened(path) as lines:
            assert list(lines.records) == [0]
            lines.add({"stream": 2})
        assert path.read_bytes() == kept + json.dumps({"stream": 2}).encode() + b"\n"


def test_a_header_cut_short_by_a_kill_is_written_again(tmp_path):
    path = tmp_path / "run.jsonl"
    opened(path).close()
    whole = path.read_bytes()
    for left in range(len(whole) + 1):
        path.write_bytes(whole[:left])
        opened(path).close()
        assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "text", ["hello", "hello\n", '{"a": 1}\n', "[1]\n", json.dumps(HEADER) + '\n{"stream"\n{"stream": 1}\n']
)
def test_other_and_damaged_files_are_not_touched(tmp_path, text):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(UserError, match="not a measurements journal"):
        opened(path)
    assert path.read_text() == text


def test_other_settings_are_refused_in_one_line(tmp_path):
    path = tmp_path / "run.jsonl"
    opened(path).close()
    with pytest.raises(UserError, match=r"written with different settings \(seed 0 there, 1 now\)"):
        JsonLines(path, HEADER | {"seed": "1"})
    with pytest.raises(UserError, match="cannot be written"):
        opened(tmp_path / "no" / "run.jsonl")


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with suppress(EOFError), atomic_write(path) as stream:
        stream.write(b"new")
        raise EOFError
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    with atomic_write(path, private=True) as stream:
        stream.write(b"new")
    assert (path.read_bytes(), path.stat().st_mode & 0o777) == (b"new", 0o600)


@pytest.mark.parametrize(
    "open_again",
    [
        Journal,
        lambda folder: SnapshotDirectory(folder / "state"),
        lambda folder: StoreFile(folder / "store", "a stream", 1 << 20),
        lambda folder: JsonLines(folder / "lines.jsonl"),
    ],
)
def test_what_is_closed_can_be_opened_while_a_process_forked_meanwhile_lives(tmp_path, open_again):
    opened = open_again(tmp_path)
    files = {int(each): Path("/proc/self/fd", each) for each in os.listdir("/proc/self/fd")}
    mine = [handle for handle, link in files.items() if os.path.realpath(link).startswith(str(tmp_path))]
    forked = subprocess.Popen(["sleep", "60"], pass_fds=mine)
    try:
        with pytest.raises(UserError, match="another process"):
            open_again(tmp_path)
        opened.close()
        open_again(tmp_path).close()
    finally:
        forked.kill()
        forked.wait()
