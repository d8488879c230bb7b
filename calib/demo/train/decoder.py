"""The packed forward pass of the decoder, its losses and its accuracy per kind of question."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import LlavaForConditionalGeneration

from .batch import Batch
from .model import features
from .stream import FACTS, UNKNOWN

FACT_LAYER = 3  # after this many layers, so that the last one can read the facts from the cache
FACT_WEIGHT = 0.15
EVIDENCE_WEIGHT = 1.0


class FactHeads(nn.Module):
    """Linear readers of what a vision token should know; dropped from the checkpoint that is shipped."""

    def __init__(self, width: int):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(width, classes) for classes in FACTS.values())

    def loss(self, hidden: torch.Tensor, facts: torch.Tensor) -> torch.Tensor:
        """hidden [N, E], facts int64 [N, len(FACTS)]; the sum of the mean losses."""
        return sum(
            cross_entropy(head(hidden[known]), facts[known, column])
            for column, head in enumerate(self.heads)
            if (known := facts[:, column] != UNKNOWN).any()
        )


def forward(
    model: LlavaForConditionalGeneration, batch: Batch, asked_of: list[tuple[torch.Tensor, torch.Tensor]] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns question tokens' last hidden states [B, Q, E] and vision tokens' after FACT_LAYER layers [N, E]."""
    with torch.no_grad():  # the tower is trained before, and frozen
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
    """The loss to minimise and its part that is about answers."""
    asked_of: list[tuple[torch.Tensor, torch.Tensor]] = []
    hidden, known = forward(model, batch, asked_of)
    wanted = batch.labels != UNKNOWN
    answers = cross_entropy(model.lm_head(hidden[wanted]), batch.labels[wanted])
    hints = FACT_WEIGHT * heads.loss(known, batch.facts) + EVIDENCE_WEIGHT * evidence_loss(*asked_of[-1], batch)
    return answers + hints, answers.detach()


def evidence_loss(query: torch.Tensor, key: torch.Tensor, batch: Batch) -> torch.Tensor:
    """How far the last layer's first KV head, query [B, G, Q, D] and key [B, V + Q, D], is from looking at the evidence."""
    rows = batch.evidence.any(-1)
    scores = query @ key[:, None].transpose(-1, -2) / key.shape[-1] ** 0.5
    attended = scores.float().masked_fill(~batch.mask, float("-inf")).transpose(1, 2)[rows].log_softmax(-1)  # [n, G, V + Q]
    elsewhere = ~batch.evidence[rows][:, None]
    return -attended[..., : batch.vision_length].masked_fill(elsewhere, float("-inf")).logsumexp(-1).mean()


@torch.no_grad()
def right_answers(model: LlavaForConditionalGeneration, batch: Batch) -> list[tuple[int, str, bool]]:
    """(stream, kind, right) of every block: right if greedy decoding would write exactly the answer and its end."""
    hidden, _ = forward(model, batch)
    wrong = (model.lm_head(hidden).argmax(-1) != batch.labels) & (batch.labels != UNKNOWN)
    return [
        (stream, kind, not bool(wrong[stream][batch.blocks[stream] == block].any()))
        for stream, kinds in enumerate(batch.kinds)
        for block, kind in enumerate(kinds)
    ]
