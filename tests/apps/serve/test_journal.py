"""The journal in words: what is kept, found and forgotten, and what a server writes."""

import json
import random
import re
import signal
import time
from types import SimpleNamespace

import pytest
from pictures import frames
from served import eventually, serving
from tiny_models import checkpoint, family, model
from typer.testing import CliRunner

from edgevlm.apps.journal import HEADING, Journal, Line
from edgevlm.cli import app
from edgevlm.runtime.instant import Instant
from edgevlm.runtime.session import Session, TextBudget

pytest.importorskip("fastapi")
from edgevlm.apps.serve.config import JournalSettings
from edgevlm.apps.serve.stream import JournalWriter

__all__ = ["checkpoint", "family", "model"]
WORDS = ["red", "blue", "square", "circle", "door", "yard", "two", "three", "people", "parcel", "van"]


def test_lines_are_found_as_a_plain_search_finds_them(tmp_path):
    draw, journal = random.Random(1), Journal(tmp_path, days=1e5)
    lines = [Line(draw.choice("ab"), float(at), " ".join(draw.sample(WORDS, 3))) for at in range(200)]
    for line in lines:
        journal.add(line)
    for _ in range(50):
        since, until = sorted(draw.choices(range(200), k=2))
        words, camera = draw.sample(WORDS, 2), draw.choice(["a", None])
        wanted = [
            line for line in lines
            if since <= line.time <= until and camera in (None, line.camera) and {*words} <= {*line.text.split()}
        ]  # fmt: skip
        assert journal.query(" ".join(words), since, until, camera, 1000) == wanted[::-1]
    assert journal.query('" OR red* NEAR(', limit=5) == []
    best = journal.query("was there a parcel at the door?", None, None, "a", 5, any_word=True)
    assert {"parcel", "door"} <= {*best[0].text.split()}
    assert journal.delete("a", 50.0, 149.0) == sum(line.camera == "a" for line in lines[50:150])
    assert journal.query(limit=1000) == [line for line in lines if not (line.camera == "a" and 50 <= line.time <= 149)][::-1]
    journal.close()


def test_what_is_forgotten_or_old_leaves_no_bytes(tmp_path, monkeypatch):
    journal, now = Journal(tmp_path, days=30), time.time()
    for days, word in ((40, "abracadabra"), (20, "hocuspocus"), (1, "simsalabim")):
        monkeypatch.setattr(Instant, "now", lambda days=days: Instant("boot", 86_400.0 * (100 - days), now - 86_400 * days))
        journal.add(Line("door", now - 86_400 * days, f"somebody said {word}"))

    def kept():
        files = b"".join(path.read_bytes() for path in tmp_path.iterdir())
        return [word for word in ("abracadabra", "hocuspocus", "simsalabim") if word.encode() in files]

    assert kept() == ["hocuspocus", "simsalabim"]
    asked = journal.forgotten
    assert journal.delete(since=now - 86_400 * 2) == 1
    journal.add(Line("door", now, "what was seen before it was forgotten, simsalabim"), asked)
    assert kept() == ["hocuspocus"]
    assert [line.text for line in journal.query("said")] == ["somebody said hocuspocus"]
    journal.close()


def test_a_line_with_the_number_of_a_forgotten_one_has_its_own_age(tmp_path, monkeypatch):
    journal = Journal(tmp_path, days=30)
    for day in (0, 10, 20, 41.5):
        monkeypatch.setattr(Instant, "now", lambda day=day: Instant("boot", 86_400.0 * day, 86_400.0 * day))
        journal.add(Line("door", 86_400.0 * day, f"day {day:g}"))
        if day == 10:
            journal.delete(since=86_400.0 * 5)
    assert [line.text for line in journal.query()] == ["day 41.5", "day 20"]
    journal.close()


def test_a_question_gets_the_lines_that_have_its_words_and_fit(model, tmp_path):
    journal = Journal(tmp_path, days=1e5)
    for at in range(40):
        journal.add(Line("door", 1000.0 + at, "two people brought a parcel" if at == 7 else f"nothing at {at}"))
    with Session.open(model, policy="full", budget=200, text_budget=TextBudget(8, 500, 8)) as session:
        session.watch(next(frames(1, model)), 0.0)
        stream = SimpleNamespace(name="door", model=model, session=session, observer=SimpleNamespace(offset=1000.0))
        question, size = "who brought a parcel?", len(model.encode("who brought a parcel?"))
        for context in (0, 1, 400):
            writer = JournalWriter(stream, journal, JournalSettings(context=context))
            asked = writer.with_notes(question, {})
            assert len(model.encode(asked)) <= size + context
            assert asked.endswith(question)
            assert (HEADING in asked) == ("two people" in asked) == (context == 400)
            session.check(asked)
        assert writer.with_notes(question, {"since": 20.0}) == question
    journal.close()


def test_a_server_writes_one_that_outlives_it(tmp_path):
    config = tmp_path / "edgevlm.toml"
    config.write_text(f'state = "{tmp_path / "kept"}"\nfps = 8\n[journal]\nevery = 0.01\n[cameras.demo]\nsource = "demo"\n')
    with serving(tmp_path / "one", config) as server:
        lines = eventually(lambda: len(found := server.get("/v1/journal")["data"]) >= 2 and found)
        assert all(
            re.fullmatch(r"what left last\? \w+ \w+|how many objects are there now\? \d", line["text"]) for line in lines
        )
        assert [line["time"] for line in lines] == sorted((line["time"] for line in lines), reverse=True)
        pictures = [moment["jpeg_url"] for line in lines for moment in line["evidence"]]
        assert server.request("GET", pictures[0])[2][:2] == b"\xff\xd8"
        assert {"event": "line", **lines[-1]} in server.get("/v1/digest")["data"]
        assert server.get("/v1/journal?search=elephants")["data"] == []
        assert server.request("GET", "/v1/journal?since=soon")[0] == 400
        shown = CliRunner().invoke(app, ["journal", "--search", "objects", "--url", server.url, "--json"]).stdout
        assert {json.loads(line)["camera"] for line in shown.splitlines()} == {"demo"}
        none = CliRunner().invoke(app, ["journal", "--search", "elephants", "--url", server.url])
        assert (none.exit_code, none.stdout) == (0, "")
        assert "no journal lines found; a server writes a journal only if" in none.stderr
        server.end(signal.SIGKILL)
    with serving(tmp_path / "two", config) as server:
        assert lines[-1]["time"] in [line["time"] for line in server.get("/v1/journal?limit=1000")["data"]]
        server.request("PATCH", "/v1/streams/demo", {"state": "paused"})
        done = server.request("POST", "/v1/forget", {"since": "1h", "confirm": True})[2]
        assert sum(counts.get("journal", 0) for counts in json.loads(done)["streams"].values()) >= 2
        assert server.end(signal.SIGTERM) == 0
    assert b"objects are there" not in (tmp_path / "kept" / "journal.sqlite").read_bytes()
