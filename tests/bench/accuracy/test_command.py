"""The command as it is typed."""

import json

import pytest
from typer.testing import CliRunner

from edgevlm.bench.accuracy import command
from edgevlm.cli import app
from edgevlm.errors import UserError

BASE = ["bench", "accuracy", "--suite", "streamqa", "--frames", "16", "--streams", "2", "--budget", "25%,3%"]


def invoke(*more):
    return CliRunner().invoke(app, [*BASE, *more], catch_exceptions=False)


def test_json_lines_for_every_policy_and_what_was_skipped(tmp_path):
    out = tmp_path / "run.jsonl"
    done = invoke("--policy", "uniform,oracle", "--against", "uniform", "--json", "--out", str(out))
    assert (done.exit_code, done.stderr) == (1, "skipped: oracle, uniform; see the reasons above\n")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    runs = {(line["policy"], line["budget"]) for line in lines if "skipped" not in line}
    assert runs == {("full", "100%"), ("uniform", "25%"), ("oracle", "25%")}
    skipped = {line["policy"]: line["skipped"] for line in lines if line.get("budget") == "3%"}
    assert list(skipped) == ["uniform", "oracle"]
    assert all("less than one frame" in reason for reason in skipped.values())
    aggregates = {line["policy"]: line for line in lines if line.get("kind") == "now"}
    assert aggregates["full"]["accuracy"] > 0.8
    assert aggregates["full"]["streams"] == 2
    again = invoke("--policy", "uniform,oracle", "--against", "uniform", "--json", "--resume", "--out", str(out))
    assert again.stdout == done.stdout, "all of it is read, nothing is asked again"


def test_two_workers_find_what_one_finds():
    def answers(workers):
        lines = map(json.loads, invoke("--policy", "uniform", "--json", "--workers", workers).stdout.splitlines())
        return [{name: v for name, v in line.items() if name not in ("ttft_ms", "compress_ms")} for line in lines]

    assert answers("2") == answers("1")


def test_what_changed_is_a_row_beside_whole_frames():
    ways = ("--append", "all,changed:tau=0.999", "--encode", "all,changed:interval=8")
    done = invoke("--policy", "uniform", *ways, "--json")
    lines = [line for line in map(json.loads, done.stdout.splitlines()) if line.get("kind") == "backward"]
    rows = {(line["budget"], line["policy"].partition("@")[0], line["append"], line["encode"]): line for line in lines}
    assert len(rows) == len(lines) == 2 * 2 * 2
    for (_, policy, append, encode), line in rows.items():
        assert (line["appended"] < 0.6) == (append != "all")
        assert (line["encoded"] < 0.8) == (line["tower_bytes"] > 0) == (encode != "all")
        if (append, encode) != ("all", "all"):
            assert line["difference"] is not None
            assert line["against"].startswith(policy), "with its own whole frames"
            assert "@" not in line["against"]


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["--seed", "tset"], "--seed tset: give an integer from 0, or test"),
        (["--resume"], "add --out FILE"),
        (["--policy", "unifrom"], "did you mean 'uniform'"),
        (["--budget", "many"], "like 512 or 6k"),
        (["--policy", "uniform", "--against", "h2o"], "add it to --policy"),
        (["--encode", "chnaged", "--out", "never.jsonl"], "did you mean 'changed'"),
        (["--frames", "2000"], "this model has positions for"),
    ],
)
def test_what_was_typed_wrong_is_one_line(typed, said):
    with pytest.raises(UserError) as refused:
        invoke(*typed)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("more", "said"), [([], "nothing was saved"), (["--out", "run.jsonl"], "with --resume to continue")])
def test_ctrl_c_says_how_to_resume(monkeypatch, capsys, tmp_path, more, said):
    def stopped(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "compare", stopped)
    done = CliRunner().invoke(app, [*BASE, *more])
    assert isinstance(done.exception, SystemExit | KeyboardInterrupt)
    assert said in done.stderr
