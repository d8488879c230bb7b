"""What a user may point the command at: one line that names the file and the way out, exit code 2, nothing half-written."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from more_checkpoints import make_more
from safetensors.torch import load_file, save_file

from edgevlm.cli import main
from edgevlm.errors import UserError
from edgevlm.export import export_checkpoint
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.runtime.bundle import MANIFEST, Bundle, seal_manifest

SHAPE = {"layers": 3, "heads": 6, "kv_heads": 2, "shard_size": "400KB"}
INDEX = "model.safetensors.index.json"
Change = Callable[[Path], Any]


def config(**changes: Any) -> Change:
    """Change ``config.json``; ``text_`` and ``vision_`` lead into its sections; None removes a key."""

    def change(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        for key, value in changes.items():
            section = next((s for s in ("text", "vision") if key.startswith(f"{s}__")), None)
            place = content if section is None else content[f"{section}_config"]
            name = key if section is None else key.removeprefix(f"{section}__")
            if value is None:
                del place[name]
            else:
                place[name] = value
        (folder / "config.json").write_text(json.dumps(content))

    return change


def processor(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        content = json.loads((folder / "processor_config.json").read_text())
        content["image_processor"].update(changes)
        (folder / "processor_config.json").write_text(json.dumps(content))

    return change


def without(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def piped(name: str) -> Change:
    """A pipe that nobody writes to, in a file's place."""

    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


def cut(name: str) -> Change:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-100])


def text(name: str, content: str) -> Change:
    return lambda folder: (folder / name).write_text(content)


def tensor(name: str, edit: Callable[[Any], Any]) -> Change:
    """Change one tensor of the checkpoint, in whichever shard it is."""

    def change(folder: Path) -> None:
        shard = folder / json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"][name]
        tensors = load_file(shard)
        tensors[name] = edit(tensors[name])
        save_file(tensors, shard, metadata={"format": "pt"})

    return change


def with_nan(weights: Any) -> Any:
    weights[3, 5] = float("nan")
    return weights


SHARD = "model-00002-of-00004.safetensors"
NORMED = "language_model.model.layers.1.mlp.down_proj.weight"


def edgevlm(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """The command, in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["edgevlm", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(str(end.value.code))


def mapped(file: str) -> Change:
    """Map one tensor to ``file`` in the index."""

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
    (folder / "tokenizer_config.json").unlink()  # it names them, which is enough


CASES: list[tuple[Change, str]] = [
    (without("config.json"), r"config\.json: is missing"),
    (text("config.json", "[" * 100_000), r"config\.json: is not valid JSON"),
    (config(model_type="llava_next"), r"model type 'llava_next' is not supported, only llava, "),
    (piped("config.json"), r"config\.json: cannot be read \(.*not a file"),
    (config(vision__image_size=2**40), r"\(vision_config\.image_size"),
    (config(text_config=None), r"has shape .*, but config\.json specifies \(4096,\)"),
    (config(text__model_type="qwen4"), r"'qwen4' is not supported, only llama, "),
    (config(text__num_key_value_heads=4), r"6 attention heads cannot share 4"),
    (config(text__num_hidden_layers=4), r"tensor 'language_model\.model\.layers\.3\..* is missing"),
    (config(text__vocab_size=1000), r"has shape .*, but config\.json specifies \(1000, 96\)"),
    (
        config(text__use_sliding_window=True, text__sliding_window=9, text__max_window_layers=1, text__layer_types=None),
        r"sliding-window",
    ),
    (config(text__rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}), r"rotary scaling.*yarn"),
    (config(text__hidden_act="gelu"), r"hidden_act 'gelu'"),
    (config(vision__model_type="dinov2"), r"'dinov2' is not supported, only clip_vision_model, siglip_vision_model"),
    (config(vision__model_type="clip_vision_model"), r"'full' of a clip_vision_model is not supported, only 'default'"),
    (config(vision_feature_layer=9), r"vision_feature_layer \[9\]"),
    (config(image_token_index=1), r"tokens are missing \(image token 1 of config\.json"),
    (config(image_token_index=None), r"has no image_token_id"),
    (without(SHARD), rf"{SHARD}: is missing"),
    (cut(SHARD), rf"{SHARD}: is damaged or truncated"),
    (mapped("../../etc/passwd"), r"'\.\./\.\./etc/passwd' is outside the checkpoint folder"),
    (linked(SHARD), rf"{SHARD}: links to .* outside the checkpoint folder"),
    (linked("tokenizer.json"), r"tokenizer\.json: links to .* outside the checkpoint folder"),
    (pickled, r"pytorch_model\.bin: pickled weights can run code and are not supported; .* convert them"),
    (without("tokenizer.json"), r"tokenizer\.json: is missing"),
    (text("tokenizer.json", "{}"), r"tokenizer\.json: cannot be read"),
    (without_special_tokens, r"tokenizer\.json: required tokens are missing"),
    (without("chat_template.jinja"), r"chat_template\.jinja: is missing"),
    (text("chat_template.jinja", "{{ messages }}"), r"omits '<image>'"),
    (text("chat_template.jinja", "<image>{{ ''.__class__.__mro__[1].__subclasses__() }}"), r"cannot be rendered \(access to"),
    (
        text("chat_template.jinja", "<image>{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"),
        r"exceeds the limit of 2 s or 256 MB",
    ),
    (text("chat_template.jinja", "<image>{{ 'a' * 9999999999 }}"), r"exceeds the limit of 2 s or 256 MB"),
    (without("processor_config.json"), r"processor_config\.json: is missing"),
    (processor(size={"shortest_edge": 56}), r"vision tower expects 56 x 56"),
    (processor(do_pad=True), r"do_pad"),
    (processor(resample=None), r"resample None"),
    (processor(resample=0), r"resample 0 \(nearest\) is not supported; set it to one of 2 \(bilinear\), 3 .*, 1 \(lanczos\)"),
    (tensor(NORMED, lambda weights: weights.to(dtype=torch.int8)), r"tensor '.*' is I8, .*; use the unquantised checkpoint"),
    (tensor(NORMED, with_nan), r"safetensors: tensor '.*' contains NaN or infinity"),
    (config(text__vocab_size=300), r"token .* has id \d+, but the model embeds only 300"),
    (text("generation_config.json", '{"eos_token_id": 100000}'), r"stop tokens must be .*100000"),
]


@pytest.mark.parametrize(("change", "message"), CASES, ids=[message[:30] for _, message in CASES])
def test_one_line_and_nothing_written(
    exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: Change,
    message: str,
) -> None:  # fmt: skip
    folder = Path(shutil.copytree(exported("llava", **SHAPE).checkpoint, tmp_path / "in" / "checkpoint"))
    assert (folder / SHARD).exists()
    change(folder)
    capsys.readouterr()
    assert edgevlm(monkeypatch, "export", folder, "--out", tmp_path / "out" / "bundle") == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("edgevlm: ")
    assert said.err.count("\n") == 1, said.err
    assert re.search(message, said.err)
    assert not (tmp_path / "out").exists() or list((tmp_path / "out").iterdir()) == []


def test_frames_may_be_cropped_instead(exported: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(exported("llava", **SHAPE).checkpoint, tmp_path / "checkpoint"))
    crop = {"height": 56, "width": 56}
    processor(size={"shortest_edge": 64}, crop_size=crop, do_center_crop=True, resample=2)(folder)
    vision = Bundle.load(export_checkpoint(folder, tmp_path / "out")).vision
    assert (vision.fit, vision.shortest_edge, vision.size, vision.resample) == ("crop", 64, (56, 56), "bilinear")


def test_older_names_of_tensors_and_files_are_known(exported: Any, tmp_path: Path) -> None:
    """The layout of transformers 4.52 and later: model.*, vision_model, preprocessor_config.json, tokenizer_config."""
    made = exported("llava", layers=2, heads=6, kv_heads=2)
    folder = Path(shutil.copytree(made.checkpoint, tmp_path / "checkpoint"))
    tensors = load_file(folder / "model.safetensors")
    renamed = {}
    for name, tensor in tensors.items():
        new = name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_head", "lm_head")
        new = new.replace("vision_tower.", "model.vision_tower.vision_model.")
        renamed[new.replace("multi_modal_projector", "model.multi_modal_projector")] = tensor
    assert renamed.keys().isdisjoint(tensors)
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    frames = json.loads((folder / "processor_config.json").read_text())["image_processor"]
    (folder / "processor_config.json").unlink()
    (folder / "preprocessor_config.json").write_text(json.dumps(frames))
    tokens = json.loads((folder / "tokenizer_config.json").read_text())
    tokens["chat_template"] = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    again = export_checkpoint(folder, tmp_path / "out", kv="fp32")
    for name in ("decoder.weights", "decoder.onnx", "vision.weights", "vision.onnx", "bundle.json"):
        assert (again / name).read_bytes() == (made.bundle / name).read_bytes(), name


def test_a_mark_around_frames_that_is_no_token(tmp_path: Path) -> None:
    folder = make_more(tmp_path / "checkpoint", "smolvlm")
    content = json.loads((folder / "tokenizer.json").read_text())
    mark = next(token for token in content["added_tokens"] if token["content"] == "<global-img>")
    mark["content"] = "<other>"
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json: required tokens are missing .*<global-img>"):
        export_checkpoint(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_code_of_a_checkpoint_is_run(exported: Any, tmp_path: Path) -> None:
    """``auto_map`` is what transformers follows with ``trust_remote_code``; here it is ignored."""
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
    made = exported("llava", **SHAPE).checkpoint
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(made.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(os.path.join("..", "..", "blobs", str(number)))
    assert Checkpoint(snapshot).tensors.keys() == Checkpoint(made).tensors.keys()


def test_a_bundle_of_another_version(exported: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    bundle = Path(shutil.copytree(exported("llava", **SHAPE).bundle, tmp_path / "bundle"))
    manifest = json.loads((bundle / MANIFEST).read_text())
    (bundle / MANIFEST).write_bytes(seal_manifest(manifest | {"format": 99}))
    assert edgevlm(monkeypatch, "run", "--frames", "1", "--json", "--model", bundle) == 2
    said = capsys.readouterr().err
    assert "has bundle format 99, but this edgevlm supports" in said
    assert said.count("\n") == 1
