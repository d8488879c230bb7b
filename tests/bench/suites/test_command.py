"""Every suite from end to end, as it is typed."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from published import MAKERS, make_clip, ovobench_choice, write
from typer.testing import CliRunner

from edgevlm.bench.suites import SUITES
from edgevlm.cli import app
from edgevlm.errors import UserError


def command(suite, data, *more):
    base = [sys.executable, "-m", "edgevlm", "bench", "accuracy", "--suite", suite, "--data", str(data)]
    return [*base, "--policy", "infinipot-v", "--budget", "128", *more]


def run(suite, data, *more, **environment):
    """In a process of its own."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command(suite, data, *more), capture_output=True, text=True, env=variables, timeout=900, check=False)


def invoke(suite, data, *more, **environment):
    """In this process, which is quicker."""
    return CliRunner().invoke(app, command(suite, data, *more)[3:], catch_exceptions=False, env=environment)


def lines_of(done):
    assert getattr(done, "returncode", 0) == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def allowed(record):
    """The last second that an answer may have seen: of its question, or of the last poll."""
    return record["time_s"] if record["due_s"] is None else record["triggered_s"] or record["due_s"] + 4


REAL = ["Object Perception", "Counting", "Real-time visual"]
MEANS = ", mean of tasks"
COLUMNS = {
    "streamingbench": [*REAL, "Sequential Question Answering", "Proactive Output", "Contextual", "Overall"],
    "ovobench": [
        "OCR", f"Real-time{MEANS}", "EPM", f"Backward{MEANS}", "REC", "SSR", "CRR", f"Forward{MEANS}",
        "Overall, mean of categories",
    ],
}  # fmt: skip


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_from_end_to_end(tmp_path, suite):
    data, out = tmp_path / "data", tmp_path / "out.jsonl"
    MAKERS[suite](data)
    rows = lines_of((run if suite == "ovobench" else invoke)(suite, data, "--out", str(out), "--json"))
    counts = rows.pop()
    assert [row["column"] for row in rows] == COLUMNS[suite]
    assert {(row["policy"], row["budget"], row["tokens"]) for row in rows} == {("infinipot-v", "128", 128)}
    saved = [json.loads(line) for line in out.read_text().splitlines()]
    answers = saved[1:]
    assert len(answers) == counts["asked"] > 0
    assert counts["unanswered"] == []
    assert all(record["seen_until_s"] <= allowed(record) for record in answers)
    right = [record["right"] for record in answers]
    shares = {row["column"]: row["accuracy"] for row in rows if "accuracy" in row}
    if suite == "streamingbench":
        assert shares["Overall"] == pytest.approx(sum(right) / len(right), abs=1e-4)
    again = invoke(suite, data, "--out", str(out), "--json", "--resume")
    assert [json.loads(line) for line in again.stdout.splitlines()] == [*rows, counts]
    assert [json.loads(line) for line in out.read_text().splitlines()] == saved, "nothing is answered twice"
    assert invoke(suite, data, "--out", str(out), "--resume").stdout.split()[:2] == ["policy", "budget"]


def test_nothing_of_a_file_commands_the_terminal(tmp_path):
    MAKERS["streamingbench"](tmp_path)
    records = json.loads((tmp_path / "questions_real.json").read_text())
    for asked, length in zip(records[0]["questions"], (1, 30), strict=True):
        asked["task_type"] = f"\x1b]0;x\x07{'y' * length}"
    write(tmp_path / "questions_real.json", records)
    done = invoke("streamingbench", tmp_path)
    assert "y" * 30 in done.stdout
    assert all(line.isprintable() for line in (done.stdout + done.stderr).splitlines())


def test_policies_budgets_and_full_kv_side_by_side(tmp_path):
    MAKERS["ovobench"](tmp_path)
    rows = lines_of(invoke("ovobench", tmp_path, "--policy", "snapkv,full", "--budget", "128,1", "--json"))
    runs = {(row["policy"], row["budget"]) for row in rows if "column" in row}
    assert runs == {("infinipot-v", "128"), ("snapkv", "128"), ("full", "all")}
    assert {row["policy"] for row in rows if "skipped" in row} == {"infinipot-v", "snapkv"}
    tokens = {row["policy"]: row["tokens"] for row in rows if "column" in row}
    assert tokens["snapkv"] < tokens["infinipot-v"] == 128, "equal bytes: what a policy holds beside its cache counts"
    most = {row["policy"]: row["bytes"] for row in rows if "column" in row}
    assert most["snapkv"] <= most["infinipot-v"]


def test_a_run_that_was_killed_goes_on(tmp_path):
    data, out = tmp_path / "data", tmp_path / "out.jsonl"
    for number in range(5):
        make_clip(data / f"src_videos/k{number}.mp4", 20, number)
    write(data / "ovo_bench_new.json", [ovobench_choice(video=f"k{number}.mp4", realtime=20) for number in range(5)])
    started = subprocess.Popen(command("ovobench", data, "--out", str(out), "--fps", "5"), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not out.exists() or len(out.read_text().splitlines()) < 3:
        assert started.poll() is None, "it was over before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    started.send_signal(signal.SIGKILL)
    started.wait()
    before = [json.loads(line) for line in out.read_text().splitlines()[1:] if line.endswith("}")]
    assert 2 <= len(before) < 5
    with pytest.raises(UserError, match="already exists; add --resume"):
        invoke("ovobench", data, "--out", str(out), "--fps", "5")
    went_on = lines_of(invoke("ovobench", data, "--out", str(out), "--fps", "5", "--resume", "--json"))
    after = [json.loads(line) for line in out.read_text().splitlines()[1:]]
    assert after[: len(before)] == before
    assert len({record["record"] for record in after}) == len(after) == 5
    assert went_on == lines_of(invoke("ovobench", data, "--fps", "5", "--json"))
    with pytest.raises(UserError, match=r"written with different settings \(fps 5.0 there, 1.0 now\)"):
        invoke("ovobench", data, "--out", str(out), "--fps", "1", "--resume")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--policy", "oracle"], "is supported only in the demo world"),
        (["--budget", "0"], "give vision tokens per layer"),
        (["--budget", "900k"], "no policy can run"),
        (["--frames", "9"], "--frames: is not supported with --suite ovobench"),
        (["--data", "/nowhere"], "the data folder is missing"),
    ],
)
def test_what_was_typed_wrong_is_one_line(tmp_path, more, said):
    MAKERS["ovobench"](tmp_path)
    with pytest.raises(UserError) as refused:
        invoke("ovobench", tmp_path, *more)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("suite", "said"), [("videomme", "use lmms-eval"), ("ovobnech", "did you mean 'ovobench'?")])
def test_another_suite_is_refused(tmp_path, suite, said):
    with pytest.raises(UserError, match=said):
        invoke(suite, tmp_path)
