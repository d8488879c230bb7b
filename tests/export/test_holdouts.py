"""From a clip to an answer, family by family: greedy tokens of a session and of transformers' ``generate``, both in float32.

Nothing but the frames is shared: transformers has its own processors (on Pillow), chat template, tower, positions and decoder.
"""

from __future__ import annotations

import json
from contextlib import closing
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import PLACES, make_checkpoint
from clips import clip
from hf import Video, load
from more_checkpoints import CLASSES, make_more
from numpy.typing import NDArray

from edgevlm.apps.sources import SourceOptions, open_source
from edgevlm.export import export_checkpoint
from edgevlm.runtime.model import Model
from edgevlm.runtime.plugins import names
from edgevlm.runtime.session import Session

FRAMES, FPS, TOKENS = 20, 2.0, 16
QUESTION = "what color was the square?"
PROCESSORS = {"smolvlm": ("smolvlm", "SmolVLM"), "qwen": ("qwen2_vl", "Qwen2VL"), "llava": ("siglip", "Siglip")}
Images = list[NDArray[np.uint8]]
SHAPES = {"as it is": (272, 640), "4:3": (272, 364), "portrait": (272, 152)}  # (height, width) cut out of the clip's frames
QWEN = [family for family in names("families") if family.startswith("qwen")]
CASES = [(family, "as it is") for family in names("families")] + [
    (family, shape) for family in QWEN for shape in list(SHAPES)[1:]
]


def images(height: int, width: int) -> Images:
    with closing(open_source(None, str(clip("bikes.mp4")), SourceOptions(fps=FPS))) as source:
        return [frame.image[:height, -width:] for frame, _ in zip(source, range(FRAMES), strict=False)]


def checkpoint(folder: Path, family: str) -> Path:
    """A tiny checkpoint whose tower makes much of what it sees."""
    (make_more if family in CLASSES else make_checkpoint)(folder, family, seed=1, sharp=True)
    if family.startswith("qwen"):
        config = json.loads((folder / "processor_config.json").read_text())
        config["video_processor"]["size"]["longest_edge"] = 80 * 80  # fewer columns than pairs of frames
        (folder / "processor_config.json").write_text(json.dumps(config))
    return folder


def pixels(folder: Path, family: str, seen: Images, size: tuple[int, int]) -> NDArray[np.float32]:
    """Frames ``[F, 3, height, width]`` as a processor of transformers prepares them."""
    module, name = PROCESSORS[family.partition("_")[0].rstrip("23")]
    settings = next(
        value for key, value in json.loads((folder / "processor_config.json").read_text()).items() if "processor" in key
    )
    if family == "qwen3_vl":  # the budget is a clip's, of a pair of frames at the least
        settings["size"] = {edge: area // 2 for edge, area in settings["size"].items()}
    if module == "smolvlm":
        settings |= {"do_image_splitting": False, "do_pad": False}
    processor = getattr(
        import_module(f"transformers.models.{module}.image_processing_pil_{module}"), f"{name}ImageProcessorPil"
    )
    made = [processor(**settings)([[image]] if module == "smolvlm" else image, return_tensors="np") for image in seen]
    if module != "qwen2_vl":
        return np.concatenate([np.asarray(each["pixel_values"], np.float32).reshape(1, 3, *size) for each in made])
    return np.stack([unpatched(each["pixel_values"], each["image_grid_thw"][0], size) for each in made])


def unpatched(patches: Any, grid: Any, size: tuple[int, int]) -> NDArray[np.float32]:
    """The picture ``[3, height, width]`` that patches of it and of its copy were cut from, squares of two by two."""
    _, rows, columns = map(int, grid)
    side = size[0] // rows
    assert (rows * side, columns * side) == size
    cut = np.asarray(patches, np.float32).reshape(rows // 2, columns // 2, 2, 2, 3, 2, side, side)[:, :, :, :, :, 0]
    return cut.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, *size)


def generated(folder: Path, family: str, frames: NDArray[np.float32]) -> list[int]:
    """transformers' greedy tokens, the one that ends them left out."""
    from transformers import AutoTokenizer

    model, tokenizer = load(folder, family), AutoTokenizer.from_pretrained(folder)
    kind = PLACES.get(family, "video")
    content = [{"type": kind}, {"type": "text", "text": QUESTION}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True)
    place = f"<{kind}>" if not family.startswith("qwen") else "<|video_pad|>"
    if family == "qwen3_vl":
        place = f"<|vision_start|>{place}<|vision_end|>"
    before, after = text.split(place)
    if family == "smolvlm":  # of a stream, which has no length
        before, after = before + "You are provided the following series of frames from a video.\n", "\n\n" + after
    prefix, suffix = (tokenizer.encode(part, add_special_tokens=False) for part in (before, after))
    video = Video(model, family, lambda part: tokenizer.encode(part, add_special_tokens=False), frames, FPS, prefix, suffix)
    ids, given = video.ids, dict(video.given)
    if family.startswith("qwen"):
        given["mm_token_type_ids"] = (torch.tensor([ids]) == video.place).int() * 2
    if family == "qwen2_5_vl":
        given["second_per_grid_ts"] = torch.tensor([2 / FPS])
    found = model.generate(input_ids=torch.tensor([ids]), **given, max_new_tokens=TOKENS, do_sample=False)[
        0, len(ids) :
    ].tolist()
    return found[: found.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in found else found


@pytest.mark.parametrize(("family", "shape"), CASES)
def test_greedy_answers_equal_transformers(tmp_path: Path, family: str, shape: str) -> None:
    """Qwen's for frames of each shape, of a bundle that was exported for squares."""
    folder, seen = checkpoint(tmp_path / "checkpoint", family), images(*SHAPES[shape])
    bundle = export_checkpoint(folder, tmp_path / "bundle", camera=(300, 300), positions="transformers", kv="fp32")
    with closing(Model.load(bundle, threads=1)) as model:
        with Session.open(model, append="all", policy="full", budget="1.5k", chunk=4, frame_size=seen[0].shape[:2]) as session:
            for index, image in enumerate(seen):
                session.watch(image, index / FPS)
            answer = session.ask(QUESTION, max_tokens=TOKENS)
            answer.wait()
            size = session.model.bundle.vision.size
        assert not family.startswith("qwen") or size != model.bundle.vision.size
    frames = pixels(folder, family, seen, size)
    assert answer.token_ids == generated(folder, family, frames)
    assert answer.token_ids != generated(folder, family, np.full_like(frames, 0.5)), "what was seen matters"
    assert len(set(answer.token_ids)) > 1
