"""`edgevlm bench report`: pages are valid, hold what they were made of, and stay whole whatever results are called."""

import json
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from edgevlm.bench.results import report
from edgevlm.bench.results.journal import lines_of, runs_of
from edgevlm.cli import app
from edgevlm.errors import UserError

HOSTILE = "</script><script>alert(1)</script><!--\"'&\x00\x1b\ud800\ufffe<b>"
VOID = {"meta", "br", "img", "hr", "link", "input"}


DECODE = {"bench": "decode", "runtime": "edgevlm", "model": "m", "precision": "fp32", "context": 300, "threads": 1,
          "kv": "fp32", "ms_per_token": 26.0, "low": 25.0, "high": 27.5, "read_mb": 442.368}  # fmt: skip


class Strict(HTMLParser):
    """Every element that is opened is closed, in order, and nothing is loaded or run."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text = [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert tag != "script"
        assert not any(name.startswith("on") or name in ("href", "src") for name, _ in attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_names_are_hostile():
    header = {"event": "run", "id": HOSTILE, "at": HOSTILE, "note": HOSTILE, "machine": {HOSTILE: HOSTILE}, "versions": 3}
    place = {"run": HOSTILE, "entry": HOSTILE}
    lines = [header, {"event": "begin", **place, "command": HOSTILE}, {**place, "bench": "stream", "fps": 3.0},
             {**place, "bench": "accuracy", "suite": HOSTILE, "accuracy": 0.8}, {**place, **DECODE, "runtime": HOSTILE},
             {**place, "bench": "x", HOSTILE: [HOSTILE], "frames": "many", "n": 10**400},
             {"event": "failed", **place, "error": HOSTILE}]  # fmt: skip
    page = report.page(runs_of(lines, "-"))
    page.encode()
    Strict(page)


def test_the_command_and_its_baseline(tmp_path):
    for name, ms in (("old", 10.0), ("new", 20.0)):
        head = {"event": "run", "id": name, "machine": {"cpu": "a cpu"}}
        run = [head, {"run": name, "entry": "e", **DECODE, "ms_per_token": ms, "low": ms, "high": ms}]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in run))
    new, old, out = (str(tmp_path / name) for name in ("new.jsonl", "old.jsonl", "page.html"))
    done = CliRunner().invoke(app, ["bench", "report", new, "--out", out, "--baseline", old, "--fail-over", "50%"])
    assert done.exit_code == 1
    assert "Against the baseline" in Strict((tmp_path / "page.html").read_text()).text
    assert CliRunner().invoke(app, ["bench", "report", new, old, "--out", out]).exit_code == 0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{}\nnot json\n", "line 2: not valid JSON"),
        ("[1]\n", "has a line that is not an object"),
        ('{"bench": "x", "ms": NaN}\n', "line 1: not valid JSON"),
        ('{"bench": "x", "ms": 1e999}\n', "line 1: not valid JSON"),
        ("[" * 10**5 + "\n", "line 1: not"),
    ],
)
def test_files_that_are_no_results(tmp_path, content, says):
    path = tmp_path / "results.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=says):
        lines_of(tmp_path)
