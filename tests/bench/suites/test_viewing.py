"""What a question sees: every frame up to its time, and none after; each video is decoded once."""

from types import SimpleNamespace

import pytest
from published import make_clip

from edgevlm.apps.sources.recordings import VideoSource
from edgevlm.bench.suites.records import Poll, SuiteQuestion
from edgevlm.bench.suites.run import is_answered
from edgevlm.bench.suites.viewing import VideoSettings, VideoTask, VideoWorker, Viewer
from edgevlm.calib.accuracy.variants import VariantRun
from edgevlm.errors import UserError
from edgevlm.runtime.budget import TextBudget
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session

RUNS = (VariantRun("infinipot-v", "128", 128), VariantRun("uniform", "64", 64))
LIMIT = 6.0  # seconds of the clip
TEXT_BUDGET = TextBudget(0, 80, 16)


@pytest.fixture(scope="module")
def demo():
    loaded = Model.load("demo", threads=1)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("clips")
    make_clip(root / "a.mp4", LIMIT)
    (root / "broken.mp4").write_bytes(b"no video")
    return root


def asked(name, time_s=99.0, **more):
    prompt = "how many objects are there now?"
    fields = {"text": "what?", "prompt": prompt, "answer": "A", "scoring": "letter-within", "subtask": "t", "category": "c"}
    return SuiteQuestion(id=name, **{"video": "a.mp4", "options": ("no", "yes"), "time_s": time_s, **fields, **more})


def perform(demo, folder, questions, runs=RUNS, fps=1.0):
    worker = VideoWorker(VideoSettings("demo", folder, fps, TEXT_BUDGET), demo)
    return worker.perform(VideoTask(questions[0].video, tuple(questions), tuple(runs)))


def by_name(records, run=RUNS[0]):
    return {record["record"]: record for record in records if record["policy"] == run.label}


def test_a_question_sees_frames_up_to_its_time_and_none_after(demo, folder):
    questions = [asked("end"), asked("at 3", 3.0), asked("at 0", 0.0), asked("before 3", 2.99), asked("after 2", 2.01)]
    records = perform(demo, folder, questions)
    assert len(records) == 10
    for run in RUNS:
        seen = {name: (record["frames"], record["seen_until_s"]) for name, record in by_name(records, run).items()}
        assert seen == {"end": (6, 5.0), "at 3": (4, 3.0), "at 0": (1, 0.0), "before 3": (3, 2.0), "after 2": (3, 2.0)}
    assert all(record["error"] is None for record in records)


def test_answers_are_those_of_a_session_alone(demo, folder):
    """The slow reference: one session a question, which watches by itself and is asked once."""
    questions = [asked("end"), asked("at 3", 3.0), asked("other", 4.5, prompt="what color was the square?")]
    records = perform(demo, folder, questions)
    for run in RUNS:
        for question in questions:
            frames = [frame for frame in VideoSource(folder / "a.mp4", 1.0) if frame.time_s <= question.time_s]
            given = {"policy": run.label, "budget": run.tokens, "text_budget": TEXT_BUDGET, "append": "all"}
            with Session.open(demo, **given) as session:
                for frame in frames:
                    session.watch(frame.image, frame.time_s)
                expected = session.ask(question.prompt).text
            assert by_name(records, run)[question.id]["response"] == expected


def test_a_video_is_decoded_once(demo, folder, monkeypatch):
    opened = []

    class Counted(VideoSource):
        def __init__(self, path, *more):
            opened.append(path)
            super().__init__(path, *more)

    monkeypatch.setattr("edgevlm.bench.suites.viewing.VideoSource", Counted)
    assert len(perform(demo, folder, [asked("a", 1.0), asked("b", 5.0), asked("c")])) == 6
    assert opened == [folder / "a.mp4"]


def test_frames_are_encoded_once_for_all_policies(demo, folder, monkeypatch):
    encoded = []
    encode = type(demo.engine).encode
    monkeypatch.setattr(type(demo.engine), "encode", lambda self, pixels: encoded.append(len(pixels)) or encode(self, pixels))
    perform(demo, folder, [asked("end")], RUNS[:1])
    alone = encoded.copy()
    encoded.clear()
    perform(demo, folder, [asked("end")], RUNS)
    assert encoded == alone


def test_a_video_that_cannot_be_read_is_tried_again_next_time(demo, folder):
    (record,) = by_name(perform(demo, folder, [asked("x", video="broken.mp4")])).values()
    assert "not a readable video" in record["error"]
    assert record["damaged"]
    assert not is_answered(record)
    assert is_answered({**record, "damaged": False})


def scripted(monkeypatch, yes_from):
    """Answers in place of a session's: yes from a given second on. Returns the seconds at which it was polled."""
    polled = []

    def answered(viewer, place, prompt):
        if prompt != "now?":
            return SimpleNamespace(text="a square", ttft_ms=1.0)
        polled.append(viewer._seen_s)
        return SimpleNamespace(text="Yes." if viewer._seen_s >= yes_from else "No.", ttft_ms=1.0)

    monkeypatch.setattr(Viewer, "_answered", answered)
    return polled


@pytest.mark.parametrize(
    ("yes_from", "triggered", "polls", "right"), [(1.0, 1.0, 1, True), (5.0, 5.0, 5, True), (9.0, None, 5, False)]
)
def test_polls_each_second_until_yes(demo, folder, monkeypatch, yes_from, triggered, polls, right):
    times = scripted(monkeypatch, yes_from)
    proactive = {"answer": "square", "scoring": "proactive", "options": (), "poll": Poll("now?", 5.0, 3.0)}
    (record,) = by_name(perform(demo, folder, [asked("p", 1.0, **proactive)], RUNS[:1])).values()
    assert (record["triggered_s"], record["polls"], record["right"]) == (triggered, polls, right)
    assert times == [float(second) for second in range(1, polls + 1)]
    assert record["response"] == ("" if triggered is None else "a square")


def test_no_memory_stops_the_run_and_is_not_an_answer(demo, folder, monkeypatch):
    def refused(*args, **more):
        raise UserError("this stream's memory (--budget 9.0 GB) does not fit in 1.0 GB; give a lower --budget")

    monkeypatch.setattr("edgevlm.bench.suites.viewing.Session.open", refused)
    with pytest.raises(UserError, match="give a lower --budget"):
        perform(demo, folder, [asked("a")])
