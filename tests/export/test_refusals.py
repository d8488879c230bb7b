"""Checkpoints that cannot be exported: one line each, naming the file and what to do; nothing is written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from edgevlm.errors import UserError
from edgevlm.export import export_checkpoint

SHAPE = {"layers": 3, "heads": 6, "kv_heads": 2, "shard_size": "400KB"}
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
        from safetensors.torch import load_file, save_file

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
CASES: list[tuple[Change, str]] = [
    (without("config.json"), r"config\.json: is missing"),
    (text("config.json", '{"model_type": "lla'), r"config\.json: is not valid JSON"),
    (text("config.json", "[]"), r"config\.json: is not a JSON object"),
    (config(model_type="llava_next"), r"'llava_next' is not known; did you mean 'llava_next_video'"),
    (piped("config.json"), r"config\.json: cannot be read \(.*it is no file"),
    (config(quantization_config=[1]), r"\(quantization_config: "),
    (config(vision__image_size=2**40), r"\(vision_config\.image_size"),
    (config(text__rope_parameters={"rope_theta": float("nan")}), r"\(text_config\.rope_parameters\.rope_theta"),
    (config(text_config=None), r"has no text_config"),
    (config(text__model_type="qwen4"), r"'qwen4' cannot be exported; did you mean 'qwen[23]'"),
    (config(text__hidden_size=None), r"head_dim 682 is not a multiple of 8"),
    (config(text__num_key_value_heads=4), r"6 attention heads cannot share 4"),
    (config(text__num_hidden_layers=4), r"no tensor 'text\.layers\.3"),
    (config(text__vocab_size=1000), r"has shape .* where config\.json means \(1000, 96\)"),
    (config(text__use_sliding_window=True), r"sliding-window"),
    (config(text__rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}), r"rotary scaling.*yarn"),
    (config(text__hidden_act="gelu"), r"hidden_act 'gelu'"),
    (config(vision__model_type="dinov2"), r"'dinov2' cannot be exported; there are: clip_vision_model, siglip_vision_model"),
    (config(vision__model_type="clip_vision_model"), r"'full' cannot be exported; set 'default'"),
    (config(vision_feature_layer=9), r"vision_feature_layer \[9\]"),
    (config(image_token_index=1), r"lacks token 1, the image of config\.json"),
    (config(image_token_index=None), r"has no image_token_id"),
    (without(SHARD), rf"{SHARD}: is missing"),
    (cut(SHARD), rf"{SHARD}: is damaged or truncated"),
    (without("model.safetensors.index.json"), r"model\.safetensors: is missing; only safetensors"),
    (without("tokenizer.json"), r"tokenizer\.json: is missing"),
    (text("tokenizer.json", "{}"), r"tokenizer\.json: cannot be read"),
    (without("chat_template.jinja"), r"chat_template\.jinja: is missing"),
    (text("chat_template.jinja", "{{ messages }}"), r"never writes '<image>'"),
    (without("processor_config.json"), r"processor_config\.json: is missing"),
    (processor(size={"shortest_edge": 56}), r"vision tower takes 56 x 56"),
    (processor(do_pad=True), r"do_pad"),
    (processor(image_std=[1, 1, float("nan")]), r"\(image_std"),
    (processor(resample=0), r"resample 0 \(nearest\) cannot be exported; set it to one of 2 \(bilinear\), 3 .*, 1 \(lanczos\)"),
    (tensor(NORMED, lambda weights: weights.to(dtype=torch.int8)), r"tensor '.*' is I8; give the checkpoint before"),
    (tensor(NORMED, with_nan), r"safetensors: tensor '.*' holds NaN or infinity"),
    (config(text__vocab_size=300), r"has \d+ tokens and the model embeds 300"),
    (text("generation_config.json", '{"eos_token_id": 100000}'), r"stop tokens are .*100000"),
]


@pytest.mark.parametrize(("change", "message"), CASES, ids=[message[:30] for _, message in CASES])
def test_one_line_and_nothing_written(exported: Any, tmp_path: Path, change: Change, message: str) -> None:
    folder = Path(shutil.copytree(exported("llava", **SHAPE).checkpoint, tmp_path / "checkpoint"))
    assert (folder / SHARD).exists()
    change(folder)
    with pytest.raises(UserError, match=message) as error:
        export_checkpoint(folder, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_frames_may_be_cropped_instead(exported: Any, tmp_path: Path) -> None:
    from edgevlm.runtime.bundle import Bundle

    folder = Path(shutil.copytree(exported("llava", **SHAPE).checkpoint, tmp_path / "checkpoint"))
    crop = {"height": 56, "width": 56}
    processor(size={"shortest_edge": 64}, crop_size=crop, do_center_crop=True, resample=2)(folder)
    vision = Bundle.load(export_checkpoint(folder, tmp_path / "out")).vision
    assert (vision.fit, vision.shortest_edge, vision.size, vision.resample) == ("crop", 64, (56, 56), "bilinear")


def test_older_names_of_tensors_and_files_are_known(exported: Any, tmp_path: Path) -> None:
    """The layout of transformers 4.52 and later: model.*, vision_model, preprocessor_config.json, tokenizer_config."""
    from safetensors.torch import load_file, save_file

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
    again = export_checkpoint(folder, tmp_path / "out")
    for name in ("decoder.weights", "decoder.onnx", "vision.weights", "vision.onnx", "bundle.json"):
        assert (again / name).read_bytes() == (made.bundle / name).read_bytes(), name
