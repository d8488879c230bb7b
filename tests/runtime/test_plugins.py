"""Classes found by name: entry points of installed packages, and classes in files."""

import pickle
import sys
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest

from edgevlm.errors import UserError
from edgevlm.runtime import plugins
from edgevlm.runtime.engine import load_engine
from edgevlm.runtime.plugins import load_class, names

BUNDLE = SimpleNamespace(decoder=SimpleNamespace(is_causal=True))
MINE = """
from dataclasses import dataclass

@dataclass
class Mine:
    bundle: object
    threads: int = 0
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package with entry points, and the folder of it."""

    def install(points, source=MINE):
        about = tmp_path / "others-1.0.dist-info"
        about.mkdir(exist_ok=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
        (about / "entry_points.txt").write_text(points)
        (tmp_path / "others_plugins.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "others_plugins", raising=False)

    return install


@pytest.mark.parametrize("points", [None, "", "[edgevlm.policies]\nold = edgevlm.gone:Old\n"])
def test_a_stale_egg_info_beside_the_sources_hides_nothing(tmp_path, monkeypatch, points):
    known = {group: names(group) for group in ("engines", "policies")}
    stale = tmp_path / "edgevlm.egg-info"
    stale.mkdir()
    (stale / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: edgevlm\nVersion: 0.0.1\n")
    if points is not None:
        (stale / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)
    plugins._own.cache_clear()
    for group, all_of in known.items():
        assert names(group, own=True) == all_of


@pytest.mark.parametrize("group", ["engines", "families", "policies", "precisions"])
def test_all_of_our_own_can_be_loaded(group):
    for name in names(group):
        with suppress(UserError) if name == "tensorrt" else nullcontext():
            assert load_class(group, name)


def test_an_engine_of_another_package_is_found(package):
    package("[edgevlm.engines]\ntheirs = others_plugins:Mine\n")
    assert names("engines") == ["onnxruntime-cpu", "onnxruntime-cuda", "tensorrt", "theirs"]
    assert load_engine("theirs", BUNDLE, threads=2).threads == 2


def test_our_own_name_stays_ours(package):
    package("[edgevlm.engines]\nonnxruntime-cpu = others_plugins:Mine\n")
    assert load_class("engines", "onnxruntime-cpu").__module__ == "edgevlm.engines.onnxruntime_cpu"
    assert names("engines").count("onnxruntime-cpu") == 1


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="unknown engine 'tensort'; did you mean 'tensorrt'"):
        load_class("engines", "tensort")
    with pytest.raises(UserError, match="unknown policy 'zzzz'; choose from coreset, first-seen, full, "):
        load_class("policies", "zzzz")


def test_a_package_that_cannot_be_loaded_is_one_line(package):
    package("[edgevlm.engines]\na = others_plugins:Mine\nb = nothing_here:Mine\n", "import nothing_here")
    for name in "ab":
        with pytest.raises(UserError, match=f"engine {name} needs the package nothing_here, which is not installed$"):
            load_class("engines", name)
    package("[edgevlm.engines]\na = others_plugins:Missing\n")
    with pytest.raises(UserError, match=r"engine a: others_plugins:Missing cannot be loaded .*; install its package again"):
        load_class("engines", "a")


def test_a_class_in_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    found = load_class("engines", f"{path}:Mine")
    assert load_class("engines", f"{path}:Mine") is found
    assert pickle.loads(pickle.dumps(found("x", 3))) == found("x", 3)
    assert load_engine(f"{path}:Mine", BUNDLE).bundle is BUNDLE


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("{}/none.py:Mine", "", "none.py: file not found"),
        ("{}/mine.py", MINE, "add a class name; choose from .*mine.py:Mine"),
        ("{}/mine.py:Mien", MINE, "has no 'Mien'; did you mean 'Mine'?"),
        ("{}/mine.py:Mine", "x = 1\ny = x.z", "mine.py, line 2: AttributeError: 'int' object has no attribute 'z'"),
        ("{}/mine.py:Mine", "x = 1\ny = (", "mine.py, line 2: SyntaxError: "),
    ],
)
def test_a_file_that_fails_is_one_line(tmp_path, name, source, message):
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(UserError, match=message) as refused:
        load_class("policies", name.format(tmp_path))
    assert "\n" not in str(refused.value)
