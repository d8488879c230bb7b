"""Disks that are full, readers that have gone, limits, users without a home, broken installs: as real machines have them."""

import errno
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from cameras import MjpegCamera
from fastapi import FastAPI
from fastapi.testclient import TestClient
from typed import edgevlm, start

from edgevlm.apps.serve.errors import add_errors
from edgevlm.runtime.snapshots.directory import snapshots

COUNT = "how many objects are there now?"
RUN = ("run", "--frames", 8, "--ask", COUNT, "--state-every", 1000)
NOBODY = 54_321  # has no name, no home and no other process
KEPT = "+dac_read_search,+dac_override"  # reads the interpreter, wherever it is; not that which lifts limits
WITHOUT = "import sys\nsys.modules['edgevlm.runtime._native'] = None\nfrom edgevlm.__main__ import main\nmain()"


def one_line(done):
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    return done.stderr


def as_nobody(*arguments, threads=None):
    """``edgevlm ARGUMENTS`` of a user without a name, who may have so many threads."""
    if os.getuid() or shutil.which("setpriv") is None:
        pytest.skip("another user is needed: root, and setpriv of util-linux")
    user = ["--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups", "--inh-caps", KEPT, "--ambient-caps", KEPT]
    limit = [] if threads is None else ["prlimit", f"--nproc={threads}"]
    command = ["setpriv", *user, *limit, sys.executable, "-m", "edgevlm", *map(str, arguments)]
    unset = ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "EDGEVLM_CACHE")
    environment = {name: text for name, text in os.environ.items() if name not in unset}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(params=["full", "gone", "stuck"])
def stderr(request):
    """A descriptor that takes nothing: of a full disk, without a reader, and with one that does not read."""
    if request.param == "full":
        yield (full := os.open("/dev/full", os.O_WRONLY))
        os.close(full)
        return
    reading, writing = os.pipe()
    if request.param == "gone":
        os.close(reading)
    else:
        os.set_blocking(writing, False)
        while True:
            try:
                os.write(writing, b"x" * 4096)
            except BlockingIOError:
                break
        os.set_blocking(writing, True)
    yield writing
    os.close(writing)
    if request.param == "stuck":
        os.close(reading)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_message_reaches_stderr_whatever_ends_the_process(unbuffered):
    code = "import os, sys; from edgevlm.progress import guard_streams; guard_streams(); "
    code += "print('last words', file=sys.stderr); os._exit(0)"
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == "last words\n"


def test_messages_that_stderr_does_not_take_are_dropped(stderr, tmp_path):
    process = start(*RUN, "--state", tmp_path, stderr=stderr)
    out, _ = process.communicate(timeout=120)
    assert (process.returncode, out.count(COUNT), len(snapshots(tmp_path))) == (0, 1, 1)


def test_a_server_whose_log_is_full_keeps_its_last_snapshot(tmp_path):
    with open("/dev/full", "w") as full:
        process = start("serve", "--port", 0, "--state", tmp_path, stdout=full, stderr=full)
        until = time.monotonic() + 60
        while not (tmp_path / "demo" / "thumbnails.sqlite").exists() and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(2)  # it listens, and watches
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    assert len(snapshots(tmp_path / "demo")) == 1


def test_a_snapshot_that_is_refused_is_said_with_quiet(tmp_path):
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # noqa: E731
    process = start(*RUN, "--state", tmp_path, "--quiet", preexec_fn=limit)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out.count(COUNT), err.count("\n"), snapshots(tmp_path)) == (0, 1, 1, [])
    assert err.startswith(f"cannot write a snapshot to {tmp_path} (the file grew too large)")


def test_a_folder_that_cannot_be_flushed_keeps_two_snapshots(tmp_path, monkeypatch):
    flush = os.fsync

    def of_files(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        flush(handle)

    monkeypatch.setattr(os, "fsync", of_files)
    done = edgevlm("run", "--frames", 64, "--state", tmp_path, "--state-every", 0.05, "--quiet")
    assert (done.returncode, done.stderr, len(snapshots(tmp_path))) == (0, "", 2)


@pytest.mark.parametrize("arguments", [("serve", "--port", 0), ("bundles", "list")])
def test_a_user_without_a_home_is_one_line(arguments):
    assert "set HOME, or --state for a server and EDGEVLM_CACHE for bundles" in one_line(as_nobody(*arguments))


@pytest.mark.parametrize("threads", [2, 9])
def test_too_few_threads_are_one_line(threads):
    """None for the model; one too few for the run."""
    done = as_nobody("run", "--frames", 4, "--threads", 2, "--quiet", "--ask", COUNT, threads=threads)
    assert done.returncode == 0 or "no more threads can be started" in one_line(done)
    assert done.returncode or threads > 2


def test_a_system_call_that_fails_is_named_with_what_helps(monkeypatch):
    def refused(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(psutil, "Process", refused)
    said = edgevlm("run", "--frames", 1, "--quiet").stderr
    assert "refused failed (Too many open files); raise the limit on open files: ulimit -n" in said


def test_without_a_temporary_folder_tmpdir_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    monkeypatch.setattr("tempfile.tempdir", None)
    assert "TMPDIR" in one_line(edgevlm("watch", COUNT))


def test_a_package_that_is_there_and_does_not_load_is_found_by_doctor(tmp_path):
    (tmp_path / "cv2.py").write_text("raise ImportError('libGL.so.1: cannot open shared object file')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    out, _ = start("doctor", "--json", env=environment).communicate(timeout=120)
    found = {finding["check"]: finding for finding in map(json.loads, out.splitlines())}
    assert "cannot be loaded (libGL.so.1" in found["opencv"]["found"]
    assert found["extension"]["status"] == "ok"
    _, err = start("run", code=WITHOUT).communicate(timeout=120)
    assert (err.count("\n"), "edgevlm doctor" in err) == (1, True), err


def test_a_build_without_a_compiler_ends_with_what_to_install(tmp_path):
    pytest.importorskip("pybind11")
    root, folders = Path(__file__).parents[2], ["--build-temp", tmp_path, "--build-lib", tmp_path]
    environment = os.environ | {"PATH": str(tmp_path), "CXX": "g++", "CC": "g++"}
    command = [sys.executable, "setup.py", "-q", "build_ext", *folders]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode
    assert "apt install g++ python3-dev" in done.stderr.splitlines()[-1]


DEAD = "http://127.0.0.1:9"  # a proxy that is not there


def test_a_camera_in_the_house_is_reached_without_the_proxy(monkeypatch):
    monkeypatch.setenv("http_proxy", DEAD)
    with MjpegCamera(frames=100) as camera:
        done = edgevlm("run", "--camera", camera.url, "--frames", 2, "--quiet")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "variables", [{"ALL_PROXY": "socks://127.0.0.1:9"}, {"SSL_CERT_FILE": "/nonexistent.pem"}, {"https_proxy": DEAD}]
)
def test_the_variable_that_keeps_the_hub_away_is_named(variables, tmp_path):
    environment = os.environ | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": "https://192.0.2.1"} | variables
    _, err = start("plan", "org/name", env=environment).communicate(timeout=120)
    assert err.count("\n") == 1
    assert next(iter(variables)) in err


@pytest.mark.parametrize("said", ["can't start new thread", "another"])
def test_a_request_without_a_thread_is_refused_in_one_line(said):
    """Starlette would log a traceback for each."""
    app = FastAPI()
    add_errors(app)

    @app.get("/")
    async def fail():
        raise RuntimeError(said)

    found = TestClient(app, raise_server_exceptions=False).get("/")
    assert found.status_code == (500 if said == "another" else 503)
    assert said == "another" or "no more threads can be started" in found.json()["error"]["message"]
