"""Bundles kept of checkpoints: made once for a checkpoint and its options, used afterwards, listed and removed."""

import json
import multiprocessing
import os
import shutil
import sys

import pytest

from edgevlm.apps import bundles
from edgevlm.apps.cli import main
from edgevlm.errors import UserError
from edgevlm.runtime.bundle import Bundle

SHAPE = {"layers": 3, "heads": 6, "kv_heads": 2}


@pytest.fixture
def made(exported, tmp_path, monkeypatch):
    """A checkpoint of the test's own, the number of its exports, and an empty cache."""
    checkpoint = shutil.copytree(exported("llava", **SHAPE).checkpoint, tmp_path / "shop")
    monkeypatch.setenv("EDGEVLM_CACHE", str(tmp_path / "cache"))
    exports = []

    def export(folder, target, **options):
        exports.append(options)
        shutil.copytree(exported("llava", **SHAPE).bundle, target, dirs_exist_ok=True)

    monkeypatch.setattr(bundles, "export_checkpoint", export)
    return checkpoint, exports


def edgevlm(monkeypatch, *arguments):
    """The command, in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["edgevlm", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(str(end.value.code or 0))


def test_made_once_for_a_checkpoint_and_its_options(made, monkeypatch, capsys):
    checkpoint, exports = made
    paths = []
    for extra in ([], [], ["--frame-size", "320x240"], ["--st-spattn", "1"], ["--force"]):
        assert edgevlm(monkeypatch, "export", checkpoint, *extra) == 0
        paths.append(capsys.readouterr().out)
    assert paths[0] == paths[1] == paths[4]
    assert len(set(paths)) == 3
    assert len(exports) == 4
    os.utime(checkpoint / "model.safetensors", (1, 1))
    assert edgevlm(monkeypatch, "export", checkpoint) == 0
    assert capsys.readouterr().out not in paths
    Bundle.load(paths[0].strip())


def test_run_takes_a_checkpoint(made, monkeypatch, capsys):
    checkpoint, exports = made
    for _ in range(2):
        assert edgevlm(monkeypatch, "run", "--model", checkpoint, "--frames", "2", "--ask", "how many?", "--json") == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert lines[-1]["frames"] == 2
    assert len(exports) == 1


def test_a_damaged_one_is_made_again(made, monkeypatch):
    checkpoint, exports = made
    path = bundles.kept_bundle(checkpoint, print, print)
    (path / "decoder.weights").write_bytes(b"")
    assert bundles.kept_bundle(checkpoint, print, print) == path
    assert len(exports) == 2
    Bundle.load(path)


def test_listed_and_removed(made, monkeypatch, capsys):
    checkpoint, _ = made
    path = bundles.kept_bundle(checkpoint, print, print)
    assert edgevlm(monkeypatch, "bundles", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == {"bundle": path.name, "family": "llava", "bytes": facts["bytes"], "path": str(path)}
    assert facts["bytes"] == sum(file.stat().st_size for file in path.iterdir() if file.name != "bundle.json")
    assert edgevlm(monkeypatch, "bundles", "--remove", "nothing") == 2
    assert capsys.readouterr().err.startswith("edgevlm: no bundle 'nothing' is kept in ")
    assert edgevlm(monkeypatch, "bundles", "--remove", path.name) == 0
    assert capsys.readouterr().err == f"removed {path}\n"
    bundles.kept_bundle(checkpoint, print, print)
    (bundles.cache_folder() / ".shop.edgevlm-left").mkdir()
    assert edgevlm(monkeypatch, "bundles", "--remove", "all") == 0
    assert edgevlm(monkeypatch, "bundles") == 0
    assert capsys.readouterr().out == ""
    assert [item.name for item in bundles.cache_folder().iterdir()] == [f".{path.name}.lock"]


def test_one_process_makes_it_and_the_others_wait(made):
    checkpoint, exports = made
    context, said = multiprocessing.get_context("fork"), []
    target = bundles.kept_bundle(checkpoint, print, print)
    with bundles._alone(target, print):
        child = context.Process(target=lambda: sys.exit(bundles.kept_bundle(checkpoint, print, print) != target))
        child.start()
        child.join(0.3)
        assert child.is_alive()
    child.join()
    assert child.exitcode == 0
    assert (len(exports), said) == (1, [])


def test_where_they_are_kept(monkeypatch, tmp_path):
    monkeypatch.delenv("EDGEVLM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert bundles.cache_folder() == tmp_path / "edgevlm" / "bundles"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert bundles.cache_folder() == tmp_path / ".cache" / "edgevlm" / "bundles"


def test_a_cache_that_cannot_be_written_is_one_line(made, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("EDGEVLM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"bundles cannot be kept there .*; name another folder in EDGEVLM_CACHE"):
        bundles.kept_bundle(made[0], print, print)


def test_what_is_no_checkpoint_is_left_as_it_is(exported, tmp_path):
    bundle = str(exported("llava", **SHAPE).bundle)
    for model in ("demo", bundle, str(tmp_path), str(tmp_path / "nowhere")):
        assert bundles.bundle_of(model, print, print) == model
