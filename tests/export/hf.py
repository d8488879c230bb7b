"""One transformers forward over a whole video and the text around it: the oracle of every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from more_checkpoints import CLASSES
from numpy.typing import NDArray

from edgevlm.runtime.chat import Chat
from edgevlm.runtime.chunk import Chunk
from edgevlm.runtime.model import Model
from edgevlm.runtime.policies import create_policy
from edgevlm.runtime.stream import Stream

Float32 = NDArray[np.float32]
LLAVA = {"llava": "Llava", "llava_next_video": "LlavaNextVideo", "llava_onevision": "LlavaOnevision"}


def load(folder: Path, family: str) -> Any:
    """The checkpoint as transformers runs it, float32."""
    import transformers

    kind = getattr(transformers, f"{(CLASSES | LLAVA | {'gemma3': 'Gemma3'})[family]}ForConditionalGeneration")
    return kind.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


class Video:
    """What a processor hands a model for frames ``pixels [F, 3, H, W]``, normalised, sampled at ``fps``.

    ids: prefix, the video's own tokens and text, suffix. Written out here, not taken from the code under test. trained: text
    goes on behind the largest position of the video, as it did in transformers up to 5.2 and in training; newer ones let text
    go on behind the largest row or column, which a video of many frames has passed.
    """

    def __init__(
        self, model: Any, family: str, tokens: Any, pixels: Float32, fps: float, prefix: list[int], suffix: list[int],
        *, trained: bool = True,
    ):  # fmt: skip
        self.model, self.family, self.fps, self.trained = model, family, fps, trained
        kind = "smolvlm" if family == "smolvlm" else family.partition("_")[0].rstrip("23")
        body = getattr(self, f"_{kind}")(tokens, pixels)
        self.prefix, self.video = len(prefix), len(body)
        self.ids = prefix + body + suffix

    def _llava(self, tokens: Any, pixels: Float32) -> list[int]:
        config, tensor = self.model.config, torch.from_numpy(pixels)
        self.given: dict[str, Any] = {"pixel_values_videos": tensor[None]}
        self.place = config.image_token_id if self.family == "llava" else config.video_token_id
        if self.family == "llava":
            self.given = {"pixel_values": tensor}
        side = config.vision_config.image_size // config.vision_config.patch_size
        per_frame = {"llava": side, "llava_next_video": side // 2, "llava_onevision": -(-side // 2)}[self.family] ** 2
        return [self.place] * (len(pixels) * per_frame + (self.family == "llava_onevision"))  # its newline closes the video

    def _smolvlm(self, tokens: Any, pixels: Float32) -> list[int]:
        config = self.model.config
        self.given = {"pixel_values": torch.from_numpy(pixels)[None]}
        self.place = config.image_token_id
        count = self.model.model.image_seq_len
        body: list[int] = []
        for index in range(len(pixels)):
            at = index / self.fps
            text = f"\nFrame from {int(at // 60):02d}:{int(at % 60):02d}:<fake_token_around_image><global-img>"
            body += [*tokens(text), *[self.place] * count, *tokens("<fake_token_around_image>")]
        return body

    def _qwen(self, tokens: Any, pixels: Float32) -> list[int]:
        from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

        vision = self.model.config.vision_config
        patches, grid = patchify(pixels, vision.patch_size, vision.spatial_merge_size)
        self.given = {"pixel_values_videos": patches, "video_grid_thw": torch.tensor([grid])}
        self.place = self.model.config.video_token_id
        count = grid[1] * grid[2] // vision.spatial_merge_size**2
        if self.family != "qwen3_vl":
            return [self.place] * (grid[0] * count)
        body: list[int] = []
        for at in Qwen3VLProcessor._calculate_timestamps(None, list(range(len(pixels))), self.fps, 2):
            around = tokens(f"<{at:.1f} seconds><|vision_start|>"), tokens("<|vision_end|>")
            body += [*around[0], *[self.place] * count, *around[1]]
        return body

    def positions(self, count: int) -> torch.Tensor | None:
        """Position ids ``[3, 1, count]`` of the ids and what follows them; None for one axis."""
        if "qwen" not in self.family:
            return None
        ids = torch.tensor([self.ids])
        kinds = (ids == self.place).int() * 2
        grid, times = self.given["video_grid_thw"], {}
        if self.family == "qwen2_5_vl":
            times["second_per_grid_ts"] = torch.tensor([2 / self.fps])
        found = self.model.model.get_rope_index(ids, kinds, video_grid_thw=grid, **times)[0]
        start = self.prefix + self.video
        self.text_moved = int(found[:, :, :start].max()) + 1 - int(found[0, 0, start])
        found[:, :, start:] += self.text_moved * self.trained
        further = torch.arange(count - len(self.ids)) + int(found[0, 0, -1]) + 1  # as generate goes on
        return torch.cat([found, further.expand(3, 1, -1)], 2)

    def logits(self, answer: list[int]) -> Float32:
        """Of the ids in one forward, and of ``answer`` behind them: ``[ids + answer, vocab]``."""
        ids, count = torch.tensor([self.ids]), len(self.ids)
        position, given, further = self.positions(count + len(answer)), dict(self.given), {}
        if position is not None:
            given |= {"position_ids": position[:, :, :count], "mm_token_type_ids": (ids == self.place).int() * 2}
            further["position_ids"] = position[:, :, count:]
        with torch.no_grad():
            asked = self.model(input_ids=ids, use_cache=True, **given)
            said = self.model(input_ids=torch.tensor([answer]), past_key_values=asked.past_key_values, **further)
        found: Float32 = torch.cat([asked.logits[0], said.logits[0]]).numpy()
        return found


def patchify(pixels: Float32, side: int, merge: int) -> tuple[torch.Tensor, list[int]]:
    """Patches of pairs of frames, square of ``merge`` x ``merge`` by square, and how many in time, height and width.

    The last of an odd number of frames is repeated. (The processors that do it need torchvision.)
    """
    pairs = np.concatenate([pixels, pixels[-1:]])[: len(pixels) + len(pixels) % 2].reshape(-1, 2, *pixels.shape[1:])
    rows, columns = pixels.shape[2] // side, pixels.shape[3] // side
    patches = []
    for pair in pairs:
        for top, left in np.ndindex(rows // merge, columns // merge):
            for down, across in np.ndindex(merge, merge):
                y, x = (top * merge + down) * side, (left * merge + across) * side
                patches.append(pair[:, :, y : y + side, x : x + side].swapaxes(0, 1).reshape(-1))
    return torch.from_numpy(np.stack(patches)), [len(pairs), rows, columns]


def watch(model: Model, pixels: np.ndarray, fps: float, chunk: int) -> Stream:
    """A stream that has seen ``pixels [F, 3, H, W]`` in chunks and keeps all of them."""
    prefix = Chat(model.bundle.chat, model.tokenizer).prefix
    stream = Stream(model, create_policy("full"), 1200, prefix, 64, "lazy", chunk)
    waiting = Chunk(model.engine, model.bundle, stream.chunk)
    for index, frame in enumerate(pixels):
        waiting.add(frame, index / fps)
        if waiting.taken == waiting.limit or index == len(pixels) - 1:
            features, seconds, _ = waiting.encode()
            stream.append_frames(features, 0, seconds)
            waiting.clear()
    return stream


def answer(model: Model, stream: Stream, suffix: list[int], count: int) -> tuple[list[int], np.ndarray]:
    """``count`` greedy tokens, and the logits ``[count, vocab]`` that chose them."""
    tokens: list[int] = []
    logits = [stream.append_question(np.concatenate([model.closing, model.engine.embed(np.array(suffix))]))]
    while len(tokens) < count:
        tokens.append(int(np.argmax(logits[-1])))
        logits.append(stream.append_text(model.engine.embed(np.array(tokens[-1:]))))
    return tokens, np.stack(logits[:count])
