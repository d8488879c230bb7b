"""A few cases of each fuzzer; their commands make thousands, or millions."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from readers import READERS, feed, mutated


@pytest.mark.parametrize(("target", "cases"), [("manifests", 8), ("contents", 6), ("templates", 12), ("snapshots", 6)])
def test_no_file_ends_in_a_traceback(target: str, cases: int) -> None:
    command = [sys.executable, str(Path(__file__).with_name("files.py")), target, str(cases), "7"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", READERS)
def test_a_reader_reads_or_refuses(name: str) -> None:
    for number, seed in enumerate(READERS[name].seeds()):
        assert feed(name, seed), "a seed is read"
        for case in range(40):
            feed(name, mutated(seed, np.random.default_rng([number, case])))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("gguf", b"token_embd", b"token_embx"),
        ("gguf", b"\x05" + bytes(7) + b"llama", b"\x05" + bytes(7) + b"\xdelama"),
        ("processor", b'"rescale_factor": 0.1', b'"rescale_factor": null'),
        ("choices", b'"format": 2', b'"format": "a\\n"'),
        ("head", b'"name": "n"', b'"name": "m"'),
        ("head", b'"given": {"a"', b'"given": {"b"'),
    ],
)
def test_what_atheris_found_is_refused(name: str, old: bytes, new: bytes) -> None:
    seed = next(seed for seed in READERS[name].seeds() if old in seed)
    assert not feed(name, seed.replace(old, new))


def test_a_record_of_more_rows_than_it_has_is_none() -> None:
    from edgevlm.runtime.store import block

    for seed in READERS["record"].seeds():
        magic, *fields = block.HEADER.unpack_from(seed)
        fields[6] += 10_000
        assert not feed("record", block.HEADER.pack(magic, *fields) + seed[block.HEADER.size :])


DEVICE = b'{"availability_topic": "edgevlm/available", "origin": {"name": "edgevlm"}, "components": {"a": %s}}'


@pytest.mark.parametrize(
    ("name", "data", "is_read"),
    [
        ("mqtt", DEVICE % b'{"state_topic": "edgevlm/old/x"}', True),
        ("mqtt", DEVICE % b'{"platform": "image", "state_topic": "edgevlm/#"}', True),
        ("engine", b'{"bytes": 4, "sha256": "", "about": {}}', False),
        ("engine", b"[" * 10_000, False),
        ("replies", b"data: []\n\n", False),
        ("replies", b'data: {"choices": [], "edgevlm": {"evidence_held": 1, "evidence": 5}}\n\ndata: [DONE]\n\n', False),
    ],
)
def test_what_others_send_breaks_nothing_later(name: str, data: bytes, is_read: bool) -> None:
    assert feed(name, data) == is_read


def test_an_error_behind_a_reader_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgevlm.runtime.bundle.Bundle.load", Mock(side_effect=ValueError("planted")))
    with pytest.raises(ValueError, match="planted"):
        feed("manifest", READERS["manifest"].seeds()[0])
