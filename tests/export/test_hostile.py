"""What a user may point the command at: one line that names the file and the way out, exit code 2, nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_refusals import NORMED, SHAPE, SHARD, config, cut, text

from edgevlm.cli import main

INDEX = "model.safetensors.index.json"
Change = Callable[[Path], Any]


def edgevlm(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The command, in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["edgevlm", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(str(end.value.code))


def mapped(file: str) -> Change:
    """One tensor is said to lie in ``file``."""

    def change(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][NORMED] = file
        (folder / INDEX).write_text(json.dumps(index))

    return change


def linked(name: str) -> Change:
    """A file of the checkpoint becomes a link to the same file outside its folder."""

    def change(folder: Path) -> None:
        (folder.parent / "elsewhere").mkdir()
        shutil.move(folder / name, folder.parent / "elsewhere" / name)
        (folder / name).symlink_to(folder.parent / "elsewhere" / name)

    return change


def pickled(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/no'\ntR.")


def without_special_tokens(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in ("<image>", "<video>")]
    (folder / "tokenizer.json").write_text(json.dumps(content))


TURNS = "{% for m in messages %}{{ '<image>' }}{% endfor %}"
CASES: list[tuple[Change, str]] = [
    (cut(SHARD), f"{SHARD}: is damaged or truncated"),
    (mapped("../../etc/passwd"), "names '../../etc/passwd', which lies outside the checkpoint's folder"),
    (mapped("/etc/passwd"), "names '/etc/passwd', which lies outside the checkpoint's folder"),
    (mapped(SHARD.replace("2", "1", 1)), "has no tensor"),
    (linked(SHARD), f"{SHARD}: is a link out of the checkpoint's folder"),
    (linked("tokenizer.json"), "tokenizer.json: is a link out of the checkpoint's folder"),
    (linked("config.json"), "config.json: is a link out of the checkpoint's folder"),
    (pickled, "pytorch_model.bin: pickled weights can run code and are not read; convert them"),
    (without_special_tokens, "tokenizer.json: lacks token"),
    (text("config.json", "[" * 100_000), "config.json: is not valid JSON"),
    (text("chat_template.jinja", "<image>{{ ''.__class__.__mro__[1].__subclasses__() }}"), "does not render (access to"),
    (text("chat_template.jinja", "<image>{{ cycler.__init__.__globals__.os.system('touch no') }}"), "does not render"),
    (
        text("chat_template.jinja", "<image>{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"),
        "takes more than 2 s or 256 MB",
    ),
    (text("chat_template.jinja", "<image>{{ 'a' * 9999999999 }}"), "takes more than 2 s or 256 MB"),
    (text("chat_template.jinja", "<image>" + "{% for a in 'ab' %}" * 300 + "{% endfor %}" * 300), "does not render"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), CASES, ids=[message[:30] for _, message in CASES])
def test_one_line_and_nothing_written(
    exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: Change,
    message: str,
) -> None:  # fmt: skip
    folder = Path(shutil.copytree(exported("llava", **SHAPE).checkpoint, tmp_path / "in" / "checkpoint"))
    change(folder)
    capsys.readouterr()
    assert edgevlm(monkeypatch, "export", folder, "--out", tmp_path / "out" / "bundle") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("edgevlm: ")
    assert said.err.count("\n") == 1, said.err
    assert message in said.err
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_a_mark_around_frames_that_is_no_token(tmp_path: Path) -> None:
    from more_checkpoints import make_more

    from edgevlm.errors import UserError
    from edgevlm.export import export_checkpoint

    folder = make_more(tmp_path / "checkpoint", "smolvlm")
    content = json.loads((folder / "tokenizer.json").read_text())
    mark = next(token for token in content["added_tokens"] if token["content"] == "<global-img>")
    mark["content"] = "<other>"
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"tokenizer\.json: lacks token .*<global-img>"):
        export_checkpoint(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_code_of_a_checkpoint_is_run(exported: Any, tmp_path: Path) -> None:
    """``auto_map`` is what transformers follows with ``trust_remote_code``; here nobody reads it."""
    from edgevlm.export import export_checkpoint

    folder = Path(shutil.copytree(exported("llava", **SHAPE).checkpoint, tmp_path / "checkpoint"))
    for name in ("modeling_evil.py", "tokenization_evil.py", "configuration_evil.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    evil = {
        "AutoConfig": "configuration_evil.C",
        "AutoModel": "modeling_evil.M",
        "AutoTokenizer": ["tokenization_evil.T", None],
    }
    config(auto_map=evil)(folder)
    tokens = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens | {"auto_map": evil}))
    export_checkpoint(folder, tmp_path / "out")
    assert not (tmp_path / "ran").exists()


def test_the_links_of_the_hub_s_cache_are_followed(exported: Any, tmp_path: Path) -> None:
    from edgevlm.export.checkpoint import Checkpoint

    made = exported("llava", **SHAPE).checkpoint
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(made.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(os.path.join("..", "..", "blobs", str(number)))
    assert Checkpoint(snapshot).tensors.keys() == Checkpoint(made).tensors.keys()


def test_a_bundle_of_another_version(exported: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    from edgevlm.runtime.bundle import MANIFEST, seal_manifest

    bundle = Path(shutil.copytree(exported("llava", **SHAPE).bundle, tmp_path / "bundle"))
    manifest = json.loads((bundle / MANIFEST).read_text())
    (bundle / MANIFEST).write_bytes(seal_manifest(manifest | {"format": 99}))
    assert edgevlm(monkeypatch, "run", "--frames", "1", "--json", "--model", bundle) == 2
    said = capsys.readouterr().err
    assert "is of bundle format 99 and this edgevlm reads format" in said
    assert said.count("\n") == 1
