"""Bundles kept of checkpoints: made once for a checkpoint and its options, used afterwards, listed and removed."""

import json
import multiprocessing
import os
import shutil
import sys

import pytest

from edgevlm.apps.bundles import cache as bundles
from edgevlm.apps.bundles import resolve
from edgevlm.cli import main
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
        shutil.copytree(exported("llava", **SHAPE, kv=options["kv"]).bundle, target, dirs_exist_ok=True)

    monkeypatch.setattr(bundles, "export_apart", export)
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


def test_run_takes_the_one_that_is_kept_and_asks_which_of_several(made, monkeypatch, capsys):
    """Before those the one of default options, once that is kept."""
    checkpoint, exports = made
    of_int8, of_fp16 = (bundles.cached_bundle(checkpoint, print, print, kv=kv) for kv in ("int8", "fp16"))
    bundles.remove_bundles(of_fp16.name)
    assert resolve.resolve_model(str(checkpoint), print, print) == str(of_int8)
    assert "fp32 weights, int8 cache, fp32 tower" in capsys.readouterr().out
    bundles.cached_bundle(checkpoint, print, print, kv="fp16")
    assert edgevlm(monkeypatch, "run", "--model", checkpoint, "--frames", "2") == 2
    said = capsys.readouterr().err
    assert "several bundles of it are cached; give one of them as --model" in said
    assert f"{of_int8} (fp32 weights, int8 cache, fp32 tower)" in said
    assert str(of_fp16) in said
    assert edgevlm(monkeypatch, "bundles", "list") == 0
    assert "fp32 weights, fp16 cache, fp32 tower" in capsys.readouterr().out
    default = bundles.cached_bundle(checkpoint, print, print)
    assert resolve.resolve_model(str(checkpoint), print, print) == str(default)
    assert len(exports) == 4


@pytest.mark.parametrize("command", [["run", "--model"], ["plan"], ["export"], ["calibrate"]])
def test_an_address_is_no_model_and_is_not_repeated(made, monkeypatch, capsys, command):
    assert edgevlm(monkeypatch, *command, "https://u:secret@h/x") == 2
    said = capsys.readouterr().err
    assert said.endswith("a model is a folder, or ORG/NAME on the Hugging Face hub, and no address; give one of these\n")
    assert "secret" not in said


def test_listed_and_removed(made, monkeypatch, capsys):
    checkpoint, _ = made
    path = bundles.cached_bundle(checkpoint, print, print)
    assert edgevlm(monkeypatch, "bundles", "list", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == {
        "event": "bundle", "schema": 1, "bundle": path.name, "family": "llava", "precision": "fp32", "rounding": "nearest",
        "kv": "fp32", "vision_precision": "fp32", "profile": "onnxruntime",
        "bytes": facts["bytes"], "path": str(path),
    }  # fmt: skip
    assert facts["bytes"] == sum(file.stat().st_size for file in path.iterdir() if file.name != "bundle.json")
    assert edgevlm(monkeypatch, "bundles", "remove", "nothing") == 2
    assert capsys.readouterr().err.startswith("edgevlm: no bundle 'nothing' in ")
    assert edgevlm(monkeypatch, "bundles", "remove", path.name) == 0
    assert capsys.readouterr().err == f"removed {path}\n"
    bundles.cached_bundle(checkpoint, print, print)
    (bundles.cache_folder() / ".shop.edgevlm-left").mkdir()
    assert edgevlm(monkeypatch, "bundles", "remove", "all") == 0
    assert edgevlm(monkeypatch, "bundles", "list") == 0
    assert capsys.readouterr().out == ""
    assert [item.name for item in bundles.cache_folder().iterdir()] == [f".{path.name}.lock"]


def test_one_process_makes_it_and_the_others_wait(made, monkeypatch, tmp_path):
    """The first is in the middle of it until the second has said that it waits."""
    checkpoint, _ = made
    context, export = multiprocessing.get_context("fork"), bundles.export_apart
    begun, waits, exports = context.Event(), context.Event(), context.Value("i", 0)

    def slow(folder, target, **options):
        exports.value += 1
        begun.set()
        assert waits.wait(300)
        export(folder, target, **options)

    def want(notice):
        bundles.cached_bundle(checkpoint, print, notice)

    def wait(line):
        assert line == "another process is exporting this checkpoint; waiting for it"
        waits.set()

    monkeypatch.setattr(bundles, "export_apart", slow)
    first = context.Process(target=want, args=(print,))
    first.start()
    assert begun.wait(300)
    second = context.Process(target=want, args=(wait,))
    second.start()
    for child in (first, second):
        child.join(300)
        assert child.exitcode == 0
    assert exports.value == 1
