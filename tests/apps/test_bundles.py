"""Bundles kept of checkpoints: made once for a checkpoint and its options, used afterwards, listed and removed."""

import multiprocessing
import os
import shutil

import pytest
from typed import edgevlm, events, refused

from edgevlm.apps.bundles import cache as bundles
from edgevlm.apps.bundles import resolve
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


def test_made_once_for_a_checkpoint_and_its_options(made):
    checkpoint, exports = made
    extras = ([], [], ["--frame-size", "320x240"], ["--st-spattn", "1"], ["--force"])
    paths = [edgevlm("export", checkpoint, *extra).stdout for extra in extras]
    assert paths[0] == paths[1] == paths[4]
    assert len(set(paths)) == 3
    assert len(exports) == 4
    os.utime(checkpoint / "model.safetensors", (1, 1))
    assert edgevlm("export", checkpoint).stdout not in paths
    Bundle.load(paths[0].strip())


def test_run_takes_the_one_that_is_kept_and_asks_which_of_several(made, capsys):
    """Before those the one of default options, once that is kept."""
    checkpoint, exports = made
    of_int8, of_fp32 = (bundles.cached_bundle(checkpoint, print, print, kv=kv) for kv in ("int8", "fp32"))
    bundles.remove_bundles(of_fp32.name)
    assert resolve.resolve_model(str(checkpoint), print, print) == str(of_int8)
    assert "fp32 weights, int8 cache, fp32 tower" in capsys.readouterr().out
    bundles.cached_bundle(checkpoint, print, print, kv="fp32")
    said = edgevlm("run", "--model", checkpoint, "--frames", "2").stderr
    assert "several cached bundles match; choose one with --model" in said
    assert f"{of_int8} (fp32 weights, int8 cache, fp32 tower)" in said
    assert str(of_fp32) in said
    assert "fp32 weights, fp32 cache, fp32 tower" in edgevlm("bundles", "list").stdout
    default = bundles.cached_bundle(checkpoint, print, print)
    assert resolve.resolve_model(str(checkpoint), print, print) == str(default)
    assert len(exports) == 4


@pytest.mark.parametrize("command", [["run", "--model"], ["plan"], ["export"], ["calibrate"]])
def test_an_address_is_no_model_and_is_not_repeated(made, command):
    said = refused(*command, "https://u:secret@h/x")
    assert said.endswith("a model cannot be a URL; give a folder, or ORG/NAME on the Hugging Face hub\n")
    assert "secret" not in said


def test_listed_and_removed(made):
    path = bundles.cached_bundle(made[0], print, print)
    (facts,) = events("bundles", "list", "--json")
    assert facts == {
        "event": "bundle", "schema": 1, "bundle": path.name, "family": "llava", "precision": "fp32", "rounding": "nearest",
        "kv": "fp16", "vision_precision": "fp32", "profile": "onnxruntime",
        "bytes": facts["bytes"], "path": str(path),
    }  # fmt: skip
    assert facts["bytes"] == sum(file.stat().st_size for file in path.iterdir() if file.name != "bundle.json")
    assert refused("bundles", "remove", "nothing").startswith("edgevlm: bundle 'nothing' not found in ")
    assert edgevlm("bundles", "remove", path.name).stderr == f"removed {path}\n"
    bundles.cached_bundle(made[0], print, print)
    (bundles.cache_folder() / ".shop.edgevlm-left").mkdir()
    assert edgevlm("bundles", "remove", "all").returncode == 0
    assert edgevlm("bundles", "list").stdout == ""
    assert [item.name for item in bundles.cache_folder().iterdir()] == [f".{path.name}.lock"]


def test_one_process_makes_it_and_the_others_wait(made, monkeypatch):
    """The first is in the middle of it until the second has said that it waits."""
    context, export = multiprocessing.get_context("fork"), bundles.export_apart
    begun, waits, exports = context.Event(), context.Event(), context.Value("i", 0)

    def slow(folder, target, **options):
        exports.value += 1
        begun.set()
        assert waits.wait(300)
        export(folder, target, **options)

    def wait(line):
        assert line == "another process is exporting this checkpoint; waiting for it"
        waits.set()

    monkeypatch.setattr(bundles, "export_apart", slow)
    first, second = (context.Process(target=bundles.cached_bundle, args=(made[0], print, notice)) for notice in (print, wait))
    first.start()
    assert begun.wait(300)
    second.start()
    for child in (first, second):
        child.join(300)
        assert child.exitcode == 0
    assert exports.value == 1
