"""Published files to questions; hostile ones to findings."""

import json
from collections import defaultdict
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import MAKERS, ovobench_choice, write

from edgevlm.bench.suites.formats import FORMATS, ovo_question, streaming_question
from edgevlm.bench.suites.records import Dataset, seconds_of
from edgevlm.errors import UserError


def read(name, root):
    data = Dataset(root)
    return data, list(FORMATS[name].read(data))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    for name, make in MAKERS.items():
        make(root / name)
    return root


EXPECTED = {
    "streamingbench": [("A", "first-letter", 3), ("B", "first-letter", 9), ("A", "first-letter", 2), ("A", "first-letter", 4),
                       ("square", "proactive", 2)],
    "ovobench": [("B", "letter-within", 3.5), ("B", "letter-within", 3.5), ("No", "yes-no", 2), ("Yes", "yes-no", 5),
                 ("Yes", "yes-no", 1), ("No", "yes-no", 2), ("1", "digits", 2.5), ("2", "digits", 4.5)],
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_questions_of_a_published_file(folders, name):
    data, questions = read(name, folders / name)
    found = [(question.answer, question.scoring, question.time_s) for question in questions]
    assert sorted(found, key=str) == sorted(EXPECTED[name], key=str)
    assert data.findings == []
    assert not data.missing
    assert len({question.id for question in questions}) == len(questions)
    for question in questions:
        assert question.text in question.prompt
        assert all(option in question.prompt for option in question.options)


@pytest.mark.parametrize(
    "broken",
    [
        "text", None, {"answer": None}, {"answer": "E"}, {"answer": 1}, {"options": "A. x"}, {"options": ["A. x"]},
        {"options": ["x", {}]}, {"options": ["x"] * 30}, {"question": "  "}, {"question": "\ud800"}, {"question": "x" * 30_000},
    ],
)  # fmt: skip
def test_a_malformed_question_is_named_and_the_others_are_read(tmp_path, broken):
    MAKERS["streamingbench"](tmp_path)
    records = json.loads((tmp_path / "questions_real.json").read_text())
    good = records[0]["questions"][0]
    records[0]["questions"] = [good, {**good, **broken} if isinstance(broken, dict) else broken, good]
    write(tmp_path / "questions_real.json", records)
    named(*read("streamingbench", tmp_path), "questions_real.json", ["0/0", "0/2"], "0/1")


def named(data, questions, file, read, left_out, said=""):
    assert [question.id for question in questions if question.id.startswith(file)] == [f"{file}:{place}" for place in read]
    (finding,) = data.findings
    assert (finding["file"], finding["record"]) == (file, left_out)
    assert said in finding["reason"]
    assert finding["reason"].isprintable()


@pytest.mark.parametrize("video", ["../../etc/passwd", "/etc/passwd", "..\\..\\x", "C:\\x", "x\x00y", ".", "\x1b[31mred"])
def test_a_video_outside_of_the_folder_is_named_and_the_others_are_read(tmp_path, video):
    write(tmp_path / "ovo_bench_new.json", [ovobench_choice(), ovobench_choice(video=video), ovobench_choice()])
    said = "is outside the data folder"
    named(*read("ovobench", tmp_path), "ovo_bench_new.json", ["0", "2"], "1", said)


@pytest.mark.parametrize(
    ("text", "seconds"), [("00:03:10", 190), ("1:30", 90), ("12", 12), (" 00:00:01.5 ", 1.5), (3, 3), (2.5, 2.5)]
)
def test_seconds(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["{", "[" * 100_000, '{"a": 1} x', "\x00", '[{"a": ' + "9" * 5000 + "}]"])
def test_a_damaged_file_is_one_line(tmp_path, text):
    write(tmp_path / "ovo_bench_new.json", text)
    with pytest.raises(UserError, match="is damaged or not a JSON file") as refused:
        read("ovobench", tmp_path)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


anything = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda parts: st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=8), parts, max_size=3),
)


READERS = {
    "ovobench": lambda data: (partial(ovo_question, data), "test_info"),
    "real": lambda data: (partial(streaming_question, data, "real", defaultdict(list)), "questions"),
    "proactive": lambda data: (partial(streaming_question, data, "proactive", defaultdict(list)), "questions"),
}
FIELDS = {
    "ovobench": ("task", "video", "question", "options", "gt", "realtime", "test_info", "activity", "tutorial"),
    "real": ("task_type", "question", "options", "answer", "time_stamp"),
    "proactive": ("question", "time_stamp", "ground_truth_time_stamp", "ground_truth_output"),
}


@pytest.mark.parametrize("name", FIELDS)
@given(drawn=st.data())
def test_no_record_breaks_a_reader(tmp_path_factory, name, drawn):
    record = drawn.draw(st.fixed_dictionaries({}, optional=dict.fromkeys(FIELDS[name], anything)) | anything)
    data = Dataset(tmp_path_factory.getbasetemp())
    whole = record if name == "ovobench" else {"video_path": "v.mp4", "questions": [record]}
    questions = list(data.questions("f", [whole], *READERS[name](data)))
    assert questions or data.findings
    assert all(finding["reason"].isprintable() for finding in data.findings)
