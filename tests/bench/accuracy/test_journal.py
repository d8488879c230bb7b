"""A run that was stopped resumes, with the same results; one of other settings is refused."""

import json

import pytest

from edgevlm.calib.accuracy.compare import compare
from edgevlm.calib.accuracy.journal import RunJournal
from edgevlm.calib.accuracy.variants import Budget, Variant
from edgevlm.calib.accuracy.worker import AccuracySettings, Worker
from edgevlm.errors import UserError

HEADER = {"suite": "streamqa", "seed": "0", "frames": 64}
VARIANTS, BUDGETS = [Variant("sliding-window"), Variant("uniform")], [Budget("25%", 0.25)]


def record(policy="uniform", budget="25%", stream=0, **more):
    return {"policy": policy, "budget": budget, "stream": stream, "results": [], **more}


def test_what_was_added_is_there_again(tmp_path):
    path = tmp_path / "run.jsonl"
    with RunJournal(path, HEADER) as journal:
        journal.add(record(stream=0))
        assert len(path.read_text().splitlines()) == 2, "on disk at once"
        journal.add(record(stream=1, tokens=7))
    with RunJournal(path, HEADER, resume=True) as journal:
        assert list(journal.records) == [("uniform", "25%", 0), ("uniform", "25%", 1)]
        assert journal.records["uniform", "25%", 1]["tokens"] == 7


@pytest.mark.parametrize("left", [1, 20, 50])
def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path, left):
    path = tmp_path / "run.jsonl"
    with RunJournal(path, HEADER) as journal:
        journal.add(record(stream=0))
    kept = path.read_bytes()
    path.write_bytes(kept + json.dumps(record(stream=1)).encode()[:left])
    with RunJournal(path, HEADER, resume=True) as journal:
        assert list(journal.records) == [("uniform", "25%", 0)]
        journal.add(record(stream=2))
    assert path.read_bytes() == kept + json.dumps(record(stream=2)).encode() + b"\n"


def test_a_first_line_cut_short_by_a_kill_is_written_again(tmp_path):
    path = tmp_path / "run.jsonl"
    RunJournal(path, HEADER).close()
    whole = path.read_bytes()
    for left in (1, 20, len(whole) - 1, len(whole)):
        path.write_bytes(whole[:left])
        RunJournal(path, HEADER, resume=True).close()
        assert path.read_bytes() == whole


def test_other_settings_are_refused_in_one_line(tmp_path):
    path = tmp_path / "run.jsonl"
    RunJournal(path, HEADER).close()
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"made with other settings \(seed 0 there, 1 now\)") as refused:
        RunJournal(path, {**HEADER, "seed": "1"}, resume=True)
    assert "\n" not in str(refused.value)
    with pytest.raises(UserError, match="is there already; add --resume"):
        RunJournal(path, HEADER)
    assert path.read_bytes() == before


def test_other_files_are_not_touched(tmp_path):
    path = tmp_path / "notes.txt"
    for text in ("hello\n", '{"a": 1}\n', "[1]\n"):
        path.write_text(text)
        with pytest.raises(UserError, match="is not a journal"):
            RunJournal(path, HEADER, resume=True)
        assert path.read_text() == text
    with pytest.raises(UserError, match="cannot be written"):
        RunJournal(tmp_path / "no" / "run.jsonl", HEADER)


def untimed(outcome):
    drop = ("ttft_ms", "compress_ms")
    return {
        (run.label, run.budget): [
            [{name: value for name, value in result.items() if name not in drop} for result in record["results"]]
            for record in records
        ]
        for run, records in outcome.records.items()
    }


class Killed(BaseException):
    pass


def test_a_run_killed_at_any_moment_goes_on_to_the_same_results(tmp_path, monkeypatch):
    path, settings, finished = tmp_path / "run.jsonl", AccuracySettings(frames=12), []
    perform = Worker.perform

    def counted(worker, task):
        if len(finished) == 3:
            raise Killed
        finished.append((task.run.label, task.stream))
        return perform(worker, task)

    whole = compare(settings, VARIANTS, BUDGETS, 2)
    monkeypatch.setattr(Worker, "perform", counted)
    with pytest.raises(Killed):
        compare(settings, VARIANTS, BUDGETS, 2, out=path)
    done = finished.copy()
    monkeypatch.setattr(
        Worker, "perform", lambda worker, task: finished.append((task.run.label, task.stream)) or perform(worker, task)
    )
    outcome = compare(settings, VARIANTS, BUDGETS, 2, out=path, resume=True)
    assert len(done) == 3
    assert sorted(finished) == sorted((run.label, stream) for run in whole.runs for stream in range(2)), (
        "nothing was done twice"
    )
    assert untimed(outcome) == untimed(whole)
    with pytest.raises(UserError, match="frames 12 there, 16 now"):
        compare(AccuracySettings(frames=16), VARIANTS, BUDGETS, 2, out=path, resume=True)
