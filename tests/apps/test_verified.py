"""docs/verified.md, docs/security.md and docs/guide/jetson.md name commands, tests and modes that there are."""

import re
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from edgevlm.apps.commands.lazy import load_command
from edgevlm.cli import app
from edgevlm.engines.devices import device_names, load_device

ROOT = Path(__file__).parents[2]
VERIFIED = ROOT / "docs" / "verified.md"

pytestmark = pytest.mark.skipif(not VERIFIED.exists(), reason="the documents are in the source tree only")


def quoted(path):
    return re.findall(r"`([^`]+)`", path.read_text())


def commands():
    """What stands behind ``edgevlm`` in docs/verified.md, once each."""
    return sorted({text.removeprefix("edgevlm ") for text in quoted(VERIFIED) if text.startswith("edgevlm ")})


@pytest.mark.parametrize("line", commands())
def test_each_command_has_a_help_and_the_options_named(line):
    command, words = get_command(app), line.split()
    while words and words[0] in getattr(command, "commands", ()):
        name, targets = words.pop(0), getattr(command, "targets", {})
        command = load_command(name, targets[name]) if name in targets else command.commands[name]
    done = CliRunner().invoke(app, [*line.split()[: len(line.split()) - len(words)], "--help"])
    assert done.exit_code == 0, done.output
    assert command.name != "edgevlm", line  # else it is no command, and its words are not looked at
    assert {word for word in words if word.startswith("--")} <= {option for param in command.params for option in param.opts}


def test_each_path_exists():
    folders = "tests|docs|apps" if (ROOT / "apps").exists() else "tests|docs"  # beside an installed wheel there are no sources
    named = {path for text in quoted(VERIFIED) for path in re.findall(rf"\b(?:{folders})/[\w./@-]+", text)}
    assert len(named) >= 10
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_the_threat_model_names_tests_that_there_are():
    named = {
        text.partition("::")[::2]
        for text in quoted(ROOT / "docs" / "security.md")
        if text.startswith("tests/") and ".py" in text
    }
    assert len(named) >= 30
    assert [(path, test) for path, test in sorted(named) if f"def {test}" not in (ROOT / path).read_text()] == []


def test_power_modes_are_those_of_the_profiles():
    rows = dict(
        re.findall(r"^\| `(orin-[\w-]+)` \| (.*) \|$", (ROOT / "docs" / "guide" / "jetson.md").read_text(), re.MULTILINE)
    )
    profiles = {name: load_device(name)["power_modes"] for name in device_names() if name.startswith("orin")}
    assert rows == {name: ", ".join(f"{mode['id']} {mode['name']}" for mode in modes) for name, modes in profiles.items()}
