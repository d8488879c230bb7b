"""``edgevlm policies``: every policy with its settings, and defaults that can be typed back."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgevlm.apps.commands.models import list_policies
from edgevlm.cli import app
from edgevlm.runtime.policies import POLICIES, create_policy
from edgevlm.runtime.policies.description import describe


def records():
    done = CliRunner().invoke(app, ["policies", "--json"])
    assert done.exit_code == 0
    return {record["policy"]: record for record in map(json.loads, done.stdout.splitlines())}


def test_the_json_has_every_policy_on_a_line_of_its_own():
    assert list(records()) == [*POLICIES, "auto"]
    for record in records().values():
        assert set(record) == {"event", "schema", "policy", "paper", "idea", "settings", "ours"}
        assert record["paper"]
        assert record["idea"].endswith(".")


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_setting_has_a_meaning_and_its_default_can_be_typed(name):
    for setting in records()[name]["settings"]:
        assert setting["meaning"], f"{name} says nothing of {setting['name']}"
        typed = {True: "on", False: "off"}[setting["default"]] if setting["choices"] == ["on", "off"] else setting["default"]
        if "," not in str(typed):  # a text with commas cannot be typed
            made = create_policy(f"{name}:{setting['name']}={typed}")
            assert getattr(made, setting["name"]) == setting["default"]


@pytest.mark.parametrize("name", list(POLICIES))
def test_the_documentation_has_a_section_with_every_setting(name):
    page = (Path(__file__).parents[2] / "docs" / "internals" / "policies.md").read_text()
    section = page.split(f"\n## {name}\n")[1].split("\n## ")[0]
    missing = [setting.name for setting in describe(POLICIES[name]).settings if f"`{setting.name}`" not in section]
    assert not missing


def test_settings_written_in_the_documentation_can_be_typed():
    page = (Path(__file__).parents[2] / "docs" / "internals" / "policies.md").read_text()
    written = re.findall(rf"`((?:{'|'.join(POLICIES)}):[^`]*=[^`]*)`", page)
    assert len(written) > 3
    for text in written:
        create_policy(text)


def test_the_page_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    page = list_policies(as_json=False)
    assert max(map(len, page.splitlines())) <= 70
    for words in (
        "streaming-llm   StreamingLLM, arXiv 2309.17453",
        "    sinks=4  number",
        "    tau=  tau1/tau2/tau3",
        "Ours: ",
    ):
        assert words in page
