"""A folder of save_pretrained of each family, exported by the command and run by it on a real clip."""

import json
import sys

import pytest
from checkpoints import PLACES, make_checkpoint
from clips import clip
from more_checkpoints import CLASSES, make_more

from edgevlm.cli import main
from edgevlm.runtime.plugins import names


def edgevlm(monkeypatch, *arguments):
    """The command, in this process."""
    monkeypatch.setattr(sys, "argv", ["edgevlm", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code


def test_every_family_is_here():
    assert {*PLACES, *CLASSES} == {*names("families")}


@pytest.mark.parametrize("family", names("families"))
def test_exported_and_run(family, tmp_path, monkeypatch, capsys):
    folder, bundle = tmp_path / "checkpoint", tmp_path / "bundle"
    (make_more if family in CLASSES else make_checkpoint)(folder, family)
    edgevlm(monkeypatch, "export", folder, "--out", bundle, "--frame-size", "84x56")
    said = capsys.readouterr()
    assert said.out == f"{bundle}\n"
    assert "beyond the page cache" in said.err
    options = ["--video", clip("bikes.mp4"), "--frames", 8, "--budget", 64, "--ask", "how many are there now?", "--json"]
    edgevlm(monkeypatch, "run", "--model", bundle, *options)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    answers, summary = [line for line in lines if line["event"] == "answer"], lines[-1]
    with capsys.disabled():
        print(f"\n{family}: {said.err.strip()}; {summary['cache_tokens']} tokens held, {answers[0]['token_ids'][:8]}")
    assert [answer["question"] for answer in answers] == ["how many are there now?"]
    assert answers[0]["token_ids"]
    assert summary["frames"] == 8
    assert summary["cache_tokens"] <= 64
