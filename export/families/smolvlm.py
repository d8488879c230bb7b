"""The family SmolVLM2: SigLIP patches shuffled into fewer, wider tokens, a Llama decoder, and a timestamp before each frame."""

from __future__ import annotations

from typing import ClassVar

from edgevlm.errors import UserError
from edgevlm.export.checkpoint import Checkpoint
from edgevlm.export.families import Config, Family, FamilyParts, FrameSize, TowerGeometry, square_geometry
from edgevlm.export.frames import processor, sides

FENCE = "<fake_token_around_image>"
MOST_PIXELS = 4096  # the largest edge


class SmolVLM(Family):
    """SmolVLM2, with an opening text that omits the number of frames and the duration, because a stream has neither."""

    vision_type: ClassVar[str] = "smolvlm_vision"
    token_keys: ClassVar[tuple[str, ...]] = ("image_token_id",)
    is_sized: ClassVar[bool] = True
    tokenizer_class: ClassVar[str | None] = None
    placeholder: ClassVar[str] = "<video>"
    before: ClassVar[str] = f"\nFrame from {{minutes:02d}}:{{second:02d}}:{FENCE}<global-img>"
    after: ClassVar[str] = FENCE
    opening: ClassVar[str] = "You are provided the following series of frames from a video.\n"
    ending: ClassVar[str] = "\n\n"
    text_tokens: ClassVar[int] = 15
    merge: ClassVar[int] = 4
    template: ClassVar[str] = (  # renders like the default template of transformers' processor
        "<|im_start|>{% for message in messages %}{{ message.role.capitalize() }}:"
        "{{ '' if message.content[0].type == 'image' else ' ' }}{% for item in message.content %}"
        "{{ item.text if item.type == 'text' else '<' ~ item.type ~ '>' }}{% endfor %}"
        "<end_of_utterance>{{ '\n' }}{% endfor %}{{ 'Assistant:' if add_generation_prompt else '' }}"
    )

    def parts(self, checkpoint: Checkpoint, camera: tuple[int, int]) -> FamilyParts:
        from edgevlm.export.vision.square import SmolVLMTower

        tower = SmolVLMTower(checkpoint, self.vision_type)
        few = tower.side // tower.scale
        return FamilyParts(tower, (few, few), longest_edge=self._longest_edge(checkpoint, tower.size[0]))

    def _longest_edge(self, checkpoint: Checkpoint, side: int) -> int:
        file, config = processor(checkpoint, self.processors)
        sampled = (config.get("video_sampling") or {}).get("video_size") or sides(config)
        final = (config.get("max_image_size") or {}).get("longest_edge")
        edge = sampled.get("longest_edge")
        if final != side or not isinstance(edge, int):
            raise UserError(f"{file}: frames are resized to {edge}, then {final} pixels, but the vision tower expects {side}")
        return min(edge, MOST_PIXELS)

    def geometry(self, config: Config, sized: FrameSize) -> TowerGeometry:
        vision, hidden, scale = config["vision_config"], int(config["text_config"]["hidden_size"]), int(config["scale_factor"])
        width, side = int(vision["hidden_size"]), int(vision["image_size"]) // int(vision["patch_size"])
        tokens, projector = (side // scale) ** 2, width * scale**2 * hidden
        blocks = int(vision["num_hidden_layers"])
        return square_geometry(vision, blocks, projector, tokens, tokens, text=self.text_tokens, more=2 * width)
