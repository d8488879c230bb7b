"""Training: the packed forward is Hugging Face's, batches keep their promises, a resumed run goes on identically."""

import re

import pytest
import torch
import transformers
from train_demo.batch import (
    MAX_FRAMES,
    UNKNOWN,
    BatchPlan,
    make_batch,
    make_stream,
)
from train_demo.decoder import forward, held_out_batch
from train_demo.model import PATCHES, TRAINED_LENGTH, build_tokenizer, pixels, save_model
from train_demo.muon import Muon
from train_demo.trainer import WORLDS, Trainer

PLANS = [
    BatchPlan(2, 12, 4),
    BatchPlan(2, 12, 4, thinned=True),
    BatchPlan(2, 12, 4, thinned=True, reindexed=True),
    BatchPlan(2, 40, 2, thinned=True, reindexed=True, remnant=True, far=True),
    BatchPlan(2, MAX_FRAMES, 2, far=True),
]


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    save_model(Trainer(seed=0).model, folder)
    return folder


def test_the_checkpoint_is_a_standard_one(checkpoint, tokenizer):
    model = transformers.AutoModelForImageTextToText.from_pretrained(checkpoint)
    assert model.config.model_type == "llava"
    assert model.config.edgevlm_trained_length == TRAINED_LENGTH
    assert sum(file.stat().st_size for file in checkpoint.iterdir()) < 6.5e6
    loaded = transformers.AutoTokenizer.from_pretrained(checkpoint)
    messages = [
        {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "what left last?"}]},
        {"role": "assistant", "content": "red square"},
        {"role": "user", "content": [{"type": "text", "text": "where was the red square?"}]},
    ]
    text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == ("<bos><user><image>what left last?<assistant>red square<eos><user>where was the red square?<assistant>")
    assert loaded.encode(text, add_special_tokens=False) == tokenizer.encode(text, add_special_tokens=False)
    processor = transformers.AutoImageProcessor.from_pretrained(checkpoint)
    frames = make_stream([1], 3, []).frames
    values = processor(list(frames), return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(values, pixels(torch.from_numpy(frames)))


def test_packed_logits_are_those_of_one_plain_forward(checkpoint):
    """Each packed block against LlavaForConditionalGeneration on the rendered prompt of that block alone."""
    plain = transformers.AutoModelForImageTextToText.from_pretrained(checkpoint)
    tokenizer = build_tokenizer()
    packed = Trainer(seed=0).model
    seed, frames = [5, 5], 6
    batch = held_out_batch([seed], frames)
    images = pixels(torch.from_numpy(make_stream(seed, frames, []).frames))
    with torch.no_grad():
        logits = packed.lm_head(forward(packed, batch)[0])[0]
        for block in range(len(batch.kinds[0])):
            where = batch.blocks[0] == block
            ids = torch.cat(
                [
                    batch.prefix,
                    torch.full((frames * PATCHES,), tokenizer.convert_tokens_to_ids("<image>")),
                    batch.questions[0][where],
                ]
            )
            expected = plain(input_ids=ids[None], pixel_values=images).logits[0, -int(where.sum()) :]
            torch.testing.assert_close(logits[where], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_batches_keep_their_promises(plan, tokenizer):
    batch = make_batch([3, 1], plan, tokenizer)
    vision = batch.vision_length
    assert int(batch.positions.max()) < TRAINED_LENGTH
    assert [len(kinds) for kinds in batch.kinds] == [plan.blocks] * plan.streams
    assert all(kind.startswith("now_") for kinds in batch.kinds for kind in kinds) or not plan.remnant
    held = [int((batch.places // vision == row).sum()) for row in range(plan.streams)]
    for row in range(plan.streams):
        spots = batch.positions[row, 2 : 2 + held[row]]
        assert (spots.diff() > 0).all()
        assert spots[0] >= 2
        for block in range(plan.blocks):
            rows = torch.nonzero(batch.blocks[row] == block)[:, 0]
            seen = batch.mask[row, 0, rows]
            assert (seen[:, :vision] == seen[:1, :vision]).all(), "a question sees one moment"
            count = int(seen[0, :vision].sum())
            assert seen[0, :count].all(), "up to its moment, from the start"
            assert count <= 2 + held[row], "and no padding"
            assert batch.positions[row, vision + rows[0]] == spots[count - 3] + 1, "text follows the newest token"
            assert (spots[count - 3] - spots[count - 2 - PATCHES]) == PATCHES - 1, "whose frame is whole"
            assert (seen[:, vision:].sum(1) == torch.arange(1, len(rows) + 1)).all(), "causal, itself alone"
            evidence = batch.evidence[row, rows]
            assert not (evidence & ~seen[:, :vision]).any(), "evidence is among what is seen"
            assert (batch.labels[row, rows][evidence.any(1)] > tokenizer.eos_token_id).all(), "and for words that are learned"
            answers = batch.labels[row, rows]
            answers = tokenizer.decode(answers[answers != UNKNOWN])
            assert re.fullmatch(r"(\w+( \w+)? <eos> ?){1,3}", answers), answers


@pytest.mark.parametrize("world", WORLDS)
def test_a_resumed_run_goes_on_with_the_same_data_and_weights(world, tmp_path):
    straight = Trainer(seed=1, world=world)
    straight.step(progress=0.0)
    straight.elapsed = 12.5
    straight.save(tmp_path / "state.pt")
    resumed = Trainer.load(tmp_path / "state.pt")
    assert (resumed.steps, resumed.elapsed) == (1, 12.5)
    assert straight.step(progress=0.01) == resumed.step(progress=0.01)
    for one, other in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=0, rtol=0)
    assert not list(tmp_path.glob("*.tmp"))


def test_muon_is_torchs():
    torch.manual_seed(0)
    ours, theirs = ([torch.nn.Parameter(torch.ones(shape)) for shape in ((24, 64), (64, 24))] for _ in range(2))
    optimizers = Muon(ours, lr=0.01), torch.optim.Muon(theirs, lr=0.01, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        assert (one - 1).abs().max() > 0.01
        torch.testing.assert_close(one, other, atol=1e-3, rtol=0)
