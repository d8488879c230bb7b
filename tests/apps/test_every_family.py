"""A checkpoint of each family, as save_pretrained writes it, exported and run on a real clip by its name on a hub."""

import json
import sys

import pytest
from checkpoints import PLACES, make_checkpoint
from clips import clip
from fake_hub import FakeHub, endpoint_of, serving
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
    folder, name, hub = tmp_path / "checkpoint", f"shop/{family}", FakeHub()
    (make_more if family in CLASSES else make_checkpoint)(folder, family)
    monkeypatch.setenv("EDGEVLM_CACHE", str(tmp_path / "bundles"))
    with serving(hub) as url:
        hub.url = hub.cdn = url
        hub.add(name, folder)
        endpoint_of(url, tmp_path / "hf", monkeypatch)
        edgevlm(monkeypatch, "export", name, "--frame-size", "84x56")
    said = capsys.readouterr()
    assert said.out.startswith(str(tmp_path / "bundles"))
    options = ["--video", clip("bikes.mp4"), "--ask", "how many are there now?"]
    options += ["--frame-size", "84x56", "--frames", "8", "--budget", "64", "--json"]
    edgevlm(monkeypatch, "run", "--model", name, *options)  # the hub is gone
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    answers, summary = [line for line in lines if line["event"] == "answer"], lines[-1]
    with capsys.disabled():
        print(f"\n{family}: {said.err.strip()}; {summary['cache_tokens']} tokens held, {answers[0]['token_ids'][:8]}")
    assert [answer["question"] for answer in answers] == ["how many are there now?"]
    assert answers[0]["token_ids"]
    assert summary["frames"] == 8
    assert summary["cache_tokens"] <= 64
