"""The files of ``apps/deploy``: what systemd and a linter say of them, and that they use options that there are."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgevlm.apps.commands.lazy import load_command
from edgevlm.cli import COMMANDS

DEPLOY = Path(__file__).parents[2] / "apps" / "deploy"
PROGRAM = "/opt/edgevlm/bin/edgevlm"

pytestmark = pytest.mark.skipif(not DEPLOY.exists(), reason="the files for a device are in the source tree only")


def needs(program):
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"not installed: {program}")


@pytest.fixture
def unit(tmp_path):
    """The unit, with a program in ExecStart that is there."""
    text = (DEPLOY / "edgevlm@.service").read_text()
    assert text.count(PROGRAM) == 1
    path = tmp_path / "edgevlm@door.service"
    path.write_text(text.replace(PROGRAM, sys.executable))
    return path


def analyze(*arguments):
    return subprocess.run(["systemd-analyze", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)


@needs("systemd-analyze")
def test_systemd_accepts_the_unit(unit):
    done = analyze("verify", "--man=no", unit)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    unit.write_text(unit.read_text().replace("WatchdogSec=", "WatchDogSec="))
    assert "WatchDogSec" in analyze("verify", "--man=no", unit).stderr  # else it says nothing of a mistake either


@needs("systemd-analyze")
def test_the_unit_is_hardened(unit):
    done = analyze("security", "--offline=true", "--threshold=30", unit)
    if "unrecognized option" in done.stderr:
        pytest.skip("this systemd-analyze cannot judge a file")
    assert done.returncode == 0, done.stdout[-200:]  # exposure of at most 3.0 of 10


def test_the_unit_serves_with_options_that_there_are(unit):
    (started,) = re.findall(r"^ExecStart=(.*)$", unit.read_text(), re.MULTILINE)
    assert started.split()[1:3] == ["serve", "/etc/edgevlm/%i.toml"]
    serve = load_command("serve", COMMANDS["serve"][0])
    assert set(re.findall(r"--[\w-]+", started)) <= {name for param in serve.params for name in param.opts}


def test_the_configuration_is_one_and_its_secrets_are_those_of_the_environment(tmp_path):
    pytest.importorskip("pydantic")
    from edgevlm.apps.serve.config import settings_of

    text = re.sub(r"(?m)^# (?=\[|\w+ = )", "", (DEPLOY / "edgevlm.toml").read_text())  # what is commented out too
    (tmp_path / "edgevlm.toml").write_text(text)
    assert set(settings_of(tmp_path / "edgevlm.toml").cameras) == {"door", "yard"}
    named = re.findall(r"^(?:# )?(\w+)=", (DEPLOY / "edgevlm.env").read_text(), re.MULTILINE)
    assert set(re.findall(r'"env:(\w+)"', text)) == set(named)


@needs("hadolint")
@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.l4t"])
def test_the_dockerfile_is_clean(name):
    done = subprocess.run(["hadolint", DEPLOY / name], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_the_images_take_nothing_but_the_sources():
    """What the wheel is made of and nothing else: with the tests in it each build would be a new one."""
    root = DEPLOY.parents[1]
    kept = {line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    folders = {path.name for path in (root / "edgevlm").iterdir() if path.is_symlink()}
    needed = {"edgevlm", *folders, "setup.py", "pyproject.toml", "README.md", "LICENSE"}
    assert needed <= kept
    assert not kept & {"tests", "docs"}
    assert all((root / name).exists() for name in kept)
