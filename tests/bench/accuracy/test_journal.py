"""A run that was stopped resumes, with the same results; one of other settings is refused."""

import pytest

from edgevlm.calib.accuracy.compare import compare
from edgevlm.calib.accuracy.variants import Budget, Variant
from edgevlm.calib.accuracy.worker import AccuracySettings, Worker
from edgevlm.errors import UserError

VARIANTS, BUDGETS = [Variant("sliding-window"), Variant("uniform")], [Budget("25%", 0.25)]


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
