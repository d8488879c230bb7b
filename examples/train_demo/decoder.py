"""Run the decoder on packed batches; compute its losses, and its accuracy by kind of question on held-out streams."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import LlavaForConditionalGeneration

from edgevlm.calib.demo.questions import draw
from edgevlm.calib.demo.world import World
from edgevlm.calib.intervals import Estimate, mean
from edgevlm.runtime.taught import KINDS

from .batch import FACTS, UNKNOWN, Batch, BatchPlan, Turn, collate, make_stream, place, write_block
from .model import build_tokenizer, features

FACT_LAYER = 3  # facts are read after this many layers, so that the last layer can find them in the cache
FACT_WEIGHT = 0.15
EVIDENCE_WEIGHT = 1.0


class FactHeads(nn.Module):
    """Linear heads that read what a vision token should know. The shipped checkpoint does not have them."""

    def __init__(self, width: int):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(width, classes) for classes in FACTS.values())

    def loss(self, hidden: torch.Tensor, facts: torch.Tensor) -> torch.Tensor:
        """Return the sum of the mean losses. hidden: [N, E]. facts: int64 [N, len(FACTS)]."""
        return sum(
            cross_entropy(head(hidden[known]), facts[known, column])
            for column, head in enumerate(self.heads)
            if (known := facts[:, column] != UNKNOWN).any()
        )


def forward(
    model: LlavaForConditionalGeneration, batch: Batch, asked_of: list[tuple[torch.Tensor, torch.Tensor]] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the question tokens' last hidden states [B, Q, E] and the vision tokens' after FACT_LAYER layers [N, E]."""
    with torch.no_grad():  # the tower was trained first and is frozen
        seen = features(model, batch.patches).flatten(0, 1)[batch.sources]
    decoder = model.model.language_model
    rows, vision, width = len(batch.questions), batch.vision_length, decoder.config.hidden_size
    inputs = torch.zeros(rows * vision, width)
    inputs = inputs.index_copy(0, batch.places, model.model.multi_modal_projector(seen)).view(rows, vision, width)
    prefix = decoder.embed_tokens(batch.prefix).expand(rows, -1, -1)
    inputs = torch.cat([prefix, inputs[:, prefix.shape[1] :], decoder.embed_tokens(batch.questions)], dim=1)
    output = decoder(
        inputs_embeds=inputs,
        position_ids=batch.positions,
        attention_mask={"full_attention": batch.mask},
        use_cache=False,
        output_hidden_states=True,
        asked_of=asked_of,
    )
    known = output.hidden_states[FACT_LAYER][:, :vision].reshape(rows * vision, width)[batch.places]
    return output.last_hidden_state[:, vision:], known


def loss(model: LlavaForConditionalGeneration, heads: FactHeads, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss to minimise, and the part of it for answers."""
    asked_of: list[tuple[torch.Tensor, torch.Tensor]] = []
    hidden, known = forward(model, batch, asked_of)
    wanted = batch.labels != UNKNOWN
    answers = cross_entropy(model.lm_head(hidden[wanted]), batch.labels[wanted])
    hints = FACT_WEIGHT * heads.loss(known, batch.facts) + EVIDENCE_WEIGHT * evidence_loss(*asked_of[-1], batch)
    return answers + hints, answers.detach()


def evidence_loss(query: torch.Tensor, key: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return how far a KV head's attention is from the evidence. query: [B, G, Q, D]. key: [B, V + Q, D]."""
    rows = batch.evidence.any(-1)
    scores = query @ key[:, None].transpose(-1, -2) / key.shape[-1] ** 0.5
    attended = scores.float().masked_fill(~batch.mask, float("-inf")).transpose(1, 2)[rows].log_softmax(-1)  # [n, G, V + Q]
    elsewhere = ~batch.evidence[rows][:, None]
    return -attended[..., : batch.vision_length].masked_fill(elsewhere, float("-inf")).logsumexp(-1).mean()


@torch.no_grad()
def right_answers(model: LlavaForConditionalGeneration, batch: Batch) -> list[tuple[int, str, bool]]:
    """Return (stream, kind, right) of each block: right if greedy decoding would give exactly the answer and its end."""
    hidden, _ = forward(model, batch)
    wrong = (model.lm_head(hidden).argmax(-1) != batch.labels) & (batch.labels != UNKNOWN)
    return [
        (stream, kind, not bool(wrong[stream][batch.blocks[stream] == block].any()))
        for stream, kinds in enumerate(batch.kinds)
        for block, kind in enumerate(kinds)
    ]


HELD_OUT = 1_000_000  # first word of held-out seeds; training uses small ones
DRAWS = 2  # questions of each kind per stream, all after its last frame
AT_ONCE = 4  # streams per batch


def evaluate(
    model: LlavaForConditionalGeneration,
    streams: int = 200,
    frames: int = 64,
    seed: int = 0,
    make_world: Callable[..., World] = World,
) -> dict[str, Estimate]:
    """Return accuracy by kind, with 95 % intervals clustered by stream."""
    right: dict[str, dict[int, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for first in range(0, streams, AT_ONCE):
        seeds = [[HELD_OUT, seed, index] for index in range(first, min(first + AT_ONCE, streams))]
        for row, kind, good in right_answers(model, held_out_batch(seeds, frames, make_world)):
            right[kind][first + row].append(good)
    return {kind: mean(list(right[kind].values())) for kind in KINDS if kind in right}


def held_out_batch(seeds: list[list[int]], frames: int, make_world: Callable[..., World] = World) -> Batch:
    """Return whole streams with DRAWS questions after the last frame of each kind that can be asked."""
    tokenizer, plan = build_tokenizer(), BatchPlan(len(seeds), frames, 1)
    rows = []
    for seed in seeds:
        rng = np.random.default_rng([*seed, 1])
        stream = make_stream(seed, frames, [frames - 1], make_world=make_world)
        history = stream.asked[frames - 1]
        kept = np.ones_like(stream.occupied)
        positions = place(kept, plan, rng)
        drawn = [(kind, pair) for kind in KINDS for _ in range(DRAWS) if (pair := draw(kind, history, rng))]
        blocks = [
            write_block([Turn(kind, question.text, answer)], frames - 1, int(positions[-1]) + 1, tokenizer)
            for kind, (question, answer) in drawn
        ]
        rows.append((stream, kept, positions, blocks))
    return collate(rows, tokenizer)


def table(results: dict[str, Estimate]) -> str:
    return "\n".join(f"{kind:12} {of.value:.3f} ± {of.high - of.value:.3f}  n {of.count}" for kind, of in results.items())
