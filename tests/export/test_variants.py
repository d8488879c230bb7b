"""Configurations and files as people have them, whatever wrote them: answers are those of transformers, or one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf import Video, answer, load, watch
from safetensors.torch import load_file, save_file

from edgevlm.errors import UserError
from edgevlm.export import export_checkpoint
from edgevlm.export.checkpoint import ConfigOnly
from edgevlm.export.families import load_family
from edgevlm.export.frames import frame_preparation, pixel_budget
from edgevlm.runtime.bundle import VisionSpec
from edgevlm.runtime.chat import Chat
from edgevlm.runtime.model import Model
from edgevlm.runtime.preprocess import Preprocessor

Change = Callable[[Path], Any]
GONE = object()


def config(top: dict[str, Any], **sections: dict[str, Any]) -> Change:
    """Settings of config.json, and of ``text`` and ``vision`` in it; GONE removes one."""

    def change(folder: Path) -> None:
        whole = json.loads((folder / "config.json").read_text())
        for place, settings in [(whole, top), *((whole[f"{name}_config"], each) for name, each in sections.items())]:
            place.update(settings)
            for key in [key for key, value in settings.items() if value is GONE]:
                place.pop(key)
        (folder / "config.json").write_text(json.dumps(whole))

    return change


def weights(edit: Callable[[dict[str, Any]], Any]) -> Change:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return change


def both(*changes: Change) -> Change:
    return lambda folder: [change(folder) for change in changes]


def other_head(tensors: dict[str, Any]) -> None:
    embedding = next(value for name, value in tensors.items() if "embed_tokens" in name)
    tensors["lm_head.weight"] = torch.flip(embedding, (0,)).contiguous()


def only_head(tensors: dict[str, Any]) -> None:
    name = next(name for name in tensors if "embed_tokens" in name)
    tensors["lm_head.weight"] = tensors.pop(name)


def left_index(folder: Path) -> None:
    """The shards of an older model beside a whole file."""
    tensors = {name: -value for name, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "ORG/BASE", "peft_type": "LORA"}')
    save_file({"lora": torch.zeros(2)}, folder / "adapter_model.safetensors")


def saved_twice(tensors: dict[str, Any]) -> None:
    """Store a tensor by both its older and its newer name, as resumed training may."""
    name = next(name for name in tensors if name.endswith("layers.0.mlp.down_proj.weight"))
    tensors["model." + name.replace(".model.", ".")] = -tensors[name]


def with_adapter(tensors: dict[str, Any]) -> None:
    name = next(name for name in tensors if name.endswith("layers.0.mlp.down_proj.weight"))
    tensors[name.replace("down_proj.", "down_proj.base_layer.")] = tensors.pop(name)


TIED = {"tied": True, "layers": 1}
WIDE = {"num_hidden_layers": 1, "hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "depth": 1}
ROPE = {"rope_type": "default", "rope_theta": 5e4, "mrope_section": [60, 2, 2]}
SAME: dict[str, tuple[str, dict[str, Any], Change, str]] = {  # variant: family, shape, change to the files, notice
    "tied, another head": ("llava", TIED, weights(other_head), "lm_head.weight differs"),
    "tied in the text alone": (
        "llava_onevision", TIED, both(weights(other_head), config({"tie_word_embeddings": False})), "lm_head.weight differs",
    ),
    "tied, the head alone": ("llava", TIED, weights(only_head), ""),
    "whole file and index": ("llava", {"layers": 1}, left_index, "model.safetensors.index.json: is not used"),
    "adapter beside": ("llava", {"layers": 1}, adapter, "adapter_config.json: is not used"),
    "not said to be interleaved": (
        "qwen3_vl", WIDE, config({}, text={"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}), "",
    ),
    "said not to be interleaved": (
        "qwen3_vl", WIDE,
        config({}, text={"rope_parameters": ROPE | {"mrope_interleaved": False, "mrope_section": [24, 20, 20]}}), "",
    ),
    "another type of text": ("qwen3_vl", WIDE, config({}, text={"model_type": "qwen3"}), ""),
    "rope at the top alone": (
        "qwen2_vl", WIDE, config({"rope_scaling": ROPE, "rope_theta": 5e4}, text={"rope_parameters": GONE}), "",
    ),
    "old rope beside new": ("qwen2_5_vl", WIDE, config({}, text={"rope_scaling": ROPE}), ""),
    "windows of no layer": (
        "qwen2_vl", WIDE,
        config({}, text={"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "layer_types": GONE}), "",
    ),
    "relu": ("llava", {"layers": 1}, config({"projector_hidden_act": "relu"}), ""),
    "no types": (
        "llava", {"layers": 1, "backbone": "llama", "tower": "clip"},
        config({}, text={"model_type": GONE}, vision={"model_type": GONE}), "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_answers_are_those_of_transformers(exported: Any, tmp_path: Path, name: str) -> None:
    family, shape, change, said = SAME[name]
    plain = exported(family, **shape)
    folder = Path(shutil.copytree(plain.checkpoint, tmp_path / "checkpoint"))
    change(folder)
    lines = list[str]()
    model = Model.load(
        export_checkpoint(folder, tmp_path / "bundle", camera=(56, 84), kv="fp32", notify=lines.append), threads=1
    )
    chat = Chat(model.bundle.chat, model.tokenizer)
    pixels = np.random.default_rng(0).standard_normal((4, 3, *model.bundle.vision.size)).astype(np.float32)
    prefix, suffix = chat.prefix, chat.suffix([], "how many are there?")
    video = Video(load(folder, family), family, model.encode, pixels, 1.0, prefix, suffix)
    tokens, logits = answer(model, watch(model, pixels, 1.0, 4), suffix, 4)
    model.close()
    expected = video.logits(tokens)[len(video.ids) - 1 : -1]
    print(f"{name}: {np.abs(logits - expected).max():.1e}, deviation {expected.std():.2f}; {lines}")
    assert np.abs(logits - expected).max() < 1e-3
    assert len(lines) == bool(said)
    assert said in "".join(lines)


def processors(folder: Path, settings: dict[str, Any], name: str) -> ConfigOnly:
    whole = {"model_type": name, "text_config": {}, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(whole))
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return ConfigOnly(folder)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llava", {"size": {"shortest_edge": 48}, "crop_size": 42, "do_pad": None, "min_pixels": None}),
        ("llava", {"size": {"shortest_edge": 48}, "crop_size": {"height": 42, "width": 42}}),
        ("llava", {"size": 48, "crop_size": 42}),
        ("llava", {"size": 48, "crop_size": [42, 42], "image_mean": 0.5, "image_std": 0.25}),
        ("clip", {"size": 48, "crop_size": 42, "image_processor_type": "CLIPImageProcessorFast"}),
        ("siglip", {"size": {"height": 42, "width": 42}, "image_processor_type": "SiglipImageProcessor"}),
        ("siglip", {"size": [42, 42], "image_std": 0.25, "image_processor_type": "SiglipImageProcessor"}),
        (
            "siglip",
            {"size": {"height": 42, "width": 42}, "do_center_crop": False, "feature_extractor_type": "SiglipImageProcessor"},
        ),
    ],
)
def test_frames_are_prepared_as_the_class_of_the_file_does(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    import transformers

    title = {"llava": "Llava", "clip": "CLIP", "siglip": "Siglip"}[kind]
    theirs = getattr(transformers, f"{title}ImageProcessorPil")(**settings)
    fields = frame_preparation(processors(tmp_path, settings, "llava"), ("image_processor",), (42, 42))
    spec = VisionSpec(graph="", tokens_per_frame=1, grid=(1, 1), closing=None, **fields)
    image = np.random.default_rng(0).integers(0, 256, (60, 80, 3)).astype(np.uint8)
    wanted = np.asarray(theirs(image, return_tensors="np")["pixel_values"])[0]
    assert np.abs(Preprocessor(spec)(image) - wanted).max() < 1.01 / 255 / min(spec.std)


@pytest.mark.parametrize(
    "settings",
    [{"min_pixels": 3136, "max_pixels": 100352, "size": {"shortest_edge": 65536, "longest_edge": 300000.0}}, {"max_pixels": 9}],
)
def test_qwen3_counts_size_alone(tmp_path: Path, settings: dict[str, Any]) -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor, smart_resize

    wanted, family = Qwen3VLVideoProcessor(**settings).size, load_family("qwen3_vl", "")
    vision = {"temporal_patch_size": 2}
    found = pixel_budget(processors(tmp_path, settings, "qwen3_vl"), family.processors, 32, *family.budget(vision))
    assert found.fitted(480, 640) == smart_resize(2, 480, 640, 2, 32, wanted.shortest_edge, int(wanted.longest_edge))


def test_a_number_of_pixels_may_be_written_as_a_fraction(tmp_path: Path) -> None:
    found = processors(tmp_path, {"min_pixels": 78400.0, "max_pixels": 156800}, "qwen2_vl")
    assert pixel_budget(found, ("image_processor",), 28, (1, 2), 1).fewest == 78400


@pytest.mark.parametrize("settings", [{"min_pixels": None, "max_pixels": None}, {"min_pixels": None, "max_pixels": 100352}])
def test_pixels_may_be_null(tmp_path: Path, settings: dict[str, Any]) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    settings = settings | {"size": {"shortest_edge": 3136, "longest_edge": 12845056}}
    wanted = Qwen2VLImageProcessorPil(**settings).size
    found = pixel_budget(processors(tmp_path, settings, "qwen2_vl"), ("image_processor",), 28, (1, 2), 1)
    assert (found.fewest, found.most) == (wanted.shortest_edge, wanted.longest_edge)


def moved(name: str, to: str) -> Change:
    return lambda folder: (folder / name).rename(folder / to)


def emptied(**files: str) -> Change:
    """No weights and no config.json; these files instead."""

    def change(folder: Path) -> None:
        for name in ("model.safetensors", "config.json"):
            (folder / name).unlink()
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text)

    return change


def as_mlx(folder: Path) -> None:
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors", metadata={"format": "mlx"})


def quantised(**settings: Any) -> Change:
    return config({"quantization_config": settings})


def modelopt(folder: Path) -> None:
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))


BASE = '{"base_model_name_or_path": "ORG/BASE"}'
REFUSED: list[tuple[Change, str]] = [
    (emptied(adapter_config__json=BASE), r"adapter_config\.json: is an adapter for ORG/BASE .*merge_and_unload"),
    (
        both(adapter, lambda folder: (folder / "model.safetensors").unlink()),
        r"adapter_config\.json: is an adapter for ORG/BASE",
    ),
    (emptied(model__gguf="", mmproj__gguf=""), r"mmproj\.gguf: GGUF is not supported"),
    (moved("model.safetensors", "model-00001-of-00002.safetensors"), r"index\.json: is missing, but model-00001-of-00002"),
    (moved("model.safetensors", "pytorch_model.bin"), r"pytorch_model\.bin: pickled"),
    (as_mlx, r"model\.safetensors: MLX weights are not supported"),
    (config({"quantization": {"bits": 4, "group_size": 64}}), r"config\.json: MLX quantization"),
    (
        quantised(quant_method="bitsandbytes", load_in_4bit=True),
        r"config\.json: quantization_config\.quant_method 'bitsandbytes'",
    ),
    (quantised(quant_method="compressed-tensors", format="pack-quantized"), r"'compressed-tensors' is not supported"),
    (modelopt, r"hf_quant_config\.json: quantization\.quant_algo 'FP8' is not supported; use the original checkpoint"),
    (quantised(quant_method="fp8", weight_block_size=[128, 128]), r"'fp8' is not supported"),
    (config({"mm_vision_tower": "openai/clip", "model_type": "llava_llama"}), r"mm_vision_tower.*original LLaVA format"),
    (config({}, text={"num_hidden_layers": 2}), r"tensor '(model\.)?language_model\.(model\.)?layers\.1\..* is missing"),
    (
        weights(lambda tensors: tensors.pop(next(name for name in tensors if "lm_head" in name))),
        r"tensor 'lm_head\.weight' is missing",
    ),
    (weights(saved_twice), r"down_proj\.weight' are the same tensor, saved twice"),
    (weights(with_adapter), r"down_proj\.base_layer\.weight' is part of an adapter: merge it"),
    (
        lambda folder: (folder / "processor_config.json").write_text('{"processor_class": "LlavaProcessor"}'),
        r"processor_config\.json: has no image_processor, and preprocessor_config\.json is missing",
    ),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_one_line_before_a_tensor_is_read(
    exported: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Change, message: str
) -> None:
    folder = Path(shutil.copytree(exported("llava", layers=1).checkpoint, tmp_path / "checkpoint"))
    change(folder)
    monkeypatch.setattr("edgevlm.export.checkpoint.Unread.rows", None)
    with pytest.raises(UserError, match=message) as error:
        export_checkpoint(folder, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_gguf_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"a\.gguf: GGUF is not supported"):
        export_checkpoint(tmp_path / "a.gguf", tmp_path / "out")
