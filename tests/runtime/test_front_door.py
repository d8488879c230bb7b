"""What a Python user meets first: the names, the README's snippet, policies and budgets as they come to mind."""

import re
import runpy
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import edgevlm
from edgevlm.errors import UserError
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.policies.baselines import SlidingWindow
from edgevlm.runtime.session import Session

ROOT = Path(__file__).parents[2]


class Oldest(SlidingWindow):
    """Keeps the oldest rows, and is in no registry."""

    def score(self, layer):
        return -layer.seq


@pytest.mark.parametrize("policy", [Oldest, Oldest()], ids=["class", "instance"])
def test_a_policy_of_ones_own(policy):
    with Session.open("demo", policy=policy, budget=3 * 16, chunk=1, append="all") as session:
        for _ in range(9):
            session.watch(np.zeros((56, 56, 3), np.uint8))
        held = session.cache.frame(0)[session.cache.kind(0) == Kind.VISION]
    assert sorted(set(held.tolist())) == [0, 1, 8]


def test_an_instance_serves_one_session_at_a_time():
    mine = Oldest()
    with Session.open("demo", policy=mine, budget=64) as first:
        with pytest.raises(UserError, match="policy Oldest: this instance is in use by another session"):
            Session.open(first.model, policy=mine, budget=640)
        assert first.budget == 64
    Session.open("demo", policy=mine, budget=640).close()


def test_what_is_no_policy_is_one_line():
    class Unfinished(edgevlm.runtime.policies.Policy):
        pass

    for policy, says in [
        (3, "policy must be a name"),
        (int, "policy must be a name"),
        (Unfinished, "Unfinished: .*neither score"),
    ]:
        with pytest.raises(UserError, match=says) as refused:
            Session.open("demo", policy=policy)
        assert "\n" not in str(refused.value)


def test_bgr_frames_by_a_switch():
    image = np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8)
    with Session.open("demo", budget=64) as rgb, Session.open(rgb.model, budget=64, bgr=True) as bgr:
        np.testing.assert_array_equal(rgb.prepare(image).values, bgr.prepare(image[..., ::-1]).values)


def test_the_snippet_in_help_runs_as_it_stands():
    snippet = Session.__doc__.split("::\n\n")[1].split("\n\n")[0]
    known = {"Session": Session, "frame": np.zeros((56, 56, 3), np.uint8), "seconds": 1.5}
    exec(textwrap.dedent(snippet), known)
    assert known["answer"].finished


def test_the_readme_snippet_and_the_example_run_as_they_stand(tmp_path):
    snippet = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    (tmp_path / "snippet.py").write_text(snippet)
    said = subprocess.run([sys.executable, "snippet.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.strip()
    assert len(snippet.splitlines()) <= 10


def test_the_example_runs(capsys):
    runpy.run_path(str(ROOT / "examples" / "watch_and_ask.py"))
    assert re.search(r"\n64 frames, \d+ tokens kept\n$", capsys.readouterr().out)
