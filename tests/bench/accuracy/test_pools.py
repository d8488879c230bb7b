"""Work sharded over a Ray cluster: what one process finds, whichever workers die."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from published import MAKERS
from typer.testing import CliRunner

pytest.importorskip("ray")

from edgevlm.calib.accuracy.pools import TRIES, RayTasks
from edgevlm.cli import app
from edgevlm.errors import UserError

SMALL = ("--suite", "streamqa", "--policy", "uniform,h2o", "--frames", "16", "--budget", "50%,25%", "--streams", "3")
TIMES = ("ttft_ms", "compress_ms")


@pytest.fixture(scope="module")
def two_nodes():
    """Two Ray nodes of a processor each; the first one's address."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, connect=False, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    yield cluster.address
    cluster.shutdown()


def command(*arguments):
    return ["bench", "accuracy", *arguments]


def invoke(*arguments):
    done = CliRunner().invoke(app, command(*arguments))
    assert done.exit_code == 0, done.output
    return done


def records(path):
    """The journal's lines, without times."""

    def untimed(of):
        if isinstance(of, dict):
            return {name: untimed(value) for name, value in of.items() if name not in TIMES}
        return [untimed(each) for each in of] if isinstance(of, list) else of

    return {line for text in path.read_text().splitlines() for line in [json.dumps(untimed(json.loads(text)))]}


def test_two_nodes_find_what_one_process_finds(two_nodes, tmp_path):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    invoke(*SMALL, "--out", str(one))
    invoke(*SMALL, "--out", str(two), "--cluster", two_nodes)
    assert records(two) == records(one)
    assert len(records(one)) == 1 + 3 * 5


@pytest.mark.slow
def test_a_published_suite_is_sharded_too(two_nodes, tmp_path):
    MAKERS["streamingbench"](tmp_path)
    typed = ("--suite", "streamingbench", "--data", str(tmp_path), "--policy", "uniform", "--budget", "64", "--json")
    lines = invoke(*typed).stdout.splitlines()
    assert invoke(*typed, "--cluster", two_nodes).stdout.splitlines() == lines
    assert lines


@pytest.mark.slow
def test_a_killed_run_goes_on_where_it_stopped(two_nodes, tmp_path):
    out, typed = tmp_path / "out.jsonl", (*SMALL, "--cluster", two_nodes, "--out", str(tmp_path / "out.jsonl"))
    started = subprocess.Popen([sys.executable, "-m", "edgevlm", *command(*typed)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not out.exists() or len(out.read_text().splitlines()) < 4:
        assert started.poll() is None, "it was over before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    started.send_signal(signal.SIGKILL)
    started.wait()
    kept = out.read_text().rpartition("\n")[0].splitlines()
    invoke(*typed, "--resume")
    lines = out.read_text().splitlines()
    assert lines[: len(kept)] == kept, "what was done is not done again"
    assert len(lines) == 1 + 3 * 5 > len(kept)
    invoke(*SMALL, "--out", str(tmp_path / "whole.jsonl"))
    assert records(out) == records(tmp_path / "whole.jsonl")


def kills_itself(marks: Path, times: int):
    """What makes a worker whose process is killed at the task 3, so often."""

    def make():
        def perform(task):
            if task == 3 and len(list(marks.iterdir())) < times:
                (marks / str(os.getpid())).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return 10 * task

        return perform

    return make


def test_a_worker_that_dies_has_its_piece_done_by_another(two_nodes, tmp_path):
    assert sorted(RayTasks(two_nodes).map(print, kills_itself(tmp_path, 1), range(6))) == [0, 10, 20, 30, 40, 50]
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.slow
def test_a_piece_that_ends_all_its_workers_is_given_up(two_nodes, tmp_path):
    with pytest.raises(UserError, match=f"{TRIES} workers died of the same piece of work"):
        list(RayTasks(two_nodes).map(print, kills_itself(tmp_path, 100), range(6)))
    assert len(list(tmp_path.iterdir())) == TRIES


@pytest.mark.slow
def test_what_is_wrong_is_said_in_one_line(two_nodes, monkeypatch):
    def make():
        raise UserError("no such model here")

    with pytest.raises(UserError, match=r"^no such model here$"):
        list(RayTasks(two_nodes).map(print, make, range(2)))
    monkeypatch.setattr("edgevlm.calib.accuracy.pools.__version__", "0.0.1")
    with pytest.raises(UserError, match=r"has edgevlm .*, and this machine 0\.0\.1"):
        list(RayTasks(two_nodes).map(print, make, range(2)))
