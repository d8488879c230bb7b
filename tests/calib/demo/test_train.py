"""Training: the packed forward is Hugging Face's, batches keep their promises, a resumed run goes on identically."""

import itertools
import re

import numpy as np
import pytest
import torch
import transformers

from edgevlm.calib.demo.questions import ANSWERS, KINDS, ask
from edgevlm.calib.demo.train.batch import (
    FACTS,
    MAX_FRAMES,
    OF_OBJECTS,
    TEXT_ROOM,
    UNKNOWN,
    BatchPlan,
    make_batch,
    make_stream,
    place,
    plan_batch,
)
from edgevlm.calib.demo.train.decoder import evaluate, forward, held_out_batch, right_answers
from edgevlm.calib.demo.train.model import PATCHES, TRAINED_LENGTH, build_tokenizer, pixels, save_model
from edgevlm.calib.demo.train.muon import Muon
from edgevlm.calib.demo.train.trainer import WORLDS, Trainer, TrainSettings
from edgevlm.calib.demo.train.vision import EMPTY, make_frames
from edgevlm.calib.demo.world import COLORS

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


def test_the_tokenizer_knows_every_word(tokenizer):
    for kind, rule in KINDS.items():
        for phrasing, color in itertools.product(range(len(rule.phrasings)), range(len(COLORS))):
            question = ask(kind, phrasing, color, shape=color).text
            ids = tokenizer.encode(question, add_special_tokens=False)
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids).replace(" ?", "?") == question
    for answer in ANSWERS:
        assert tokenizer.decode(tokenizer.encode(answer, add_special_tokens=False)) == answer


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


def test_evidence_is_where_the_object_was_shown(tokenizer):
    seed, frames = [8, 2], 20
    batch = make_batch(seed, BatchPlan(1, frames, 3), tokenizer)
    facts = torch.full((batch.vision_length, len(FACTS)), UNKNOWN)
    facts[batch.places] = batch.facts
    quadrants = {f"{a} {b}": 2 * i + j for i, a in enumerate(("top", "bottom")) for j, b in enumerate(("left", "right"))}
    looked = 0
    for block, kind in enumerate(batch.kinds[0]):
        rows = torch.nonzero((batch.blocks[0] == block) & batch.evidence[0].any(1))[:, 0]
        if kind.endswith("_where"):
            last = batch.evidence[0, rows[-1]]
            assert set(facts[last, list(FACTS).index("quadrant")].tolist()) == {
                quadrants[tokenizer.decode(batch.labels[0, rows[-2:]])]
            }
            looked += 1
    assert looked


def test_batches_depend_on_the_seed_alone(tokenizer):
    one, same, other = (make_batch(seed, PLANS[2], tokenizer) for seed in ([1], [1], [2]))
    torch.testing.assert_close(one.questions, same.questions)
    torch.testing.assert_close(one.patches, same.patches)
    assert one.patches.shape != other.patches.shape or not torch.equal(one.patches, other.patches)


def test_plans_reach_the_trained_length():
    rng = np.random.default_rng(0)
    plans = [plan_batch(rng, progress) for progress in np.linspace(0, 1, 300)]
    assert max(plan.frames for plan in plans if not plan.remnant) == MAX_FRAMES
    shorter = [plan_batch(rng, progress, most=72) for progress in np.linspace(0, 1, 300)]
    assert max(plan.frames for plan in shorter if not plan.remnant) == 72
    assert not any(plan_batch(rng, progress, thin=False).thinned for progress in np.linspace(0, 1, 100))
    assert all(any(getattr(plan, flag) for plan in plans) for flag in ("thinned", "reindexed", "remnant", "far"))
    whole = np.ones((8, PATCHES), dtype=bool)
    reached = max(int(place(whole, BatchPlan(1, 8, 1, far=True), rng)[-1]) for _ in range(200))
    assert TRAINED_LENGTH - 100 < reached + TEXT_ROOM <= TRAINED_LENGTH


def test_facts_are_about_the_object_in_the_patch():
    stream = make_stream([4], 64, [63])
    history = stream.asked[63]
    assert history.complete
    names = list(FACTS)
    for time, patch in zip(*np.nonzero(stream.occupied), strict=True):
        fact = dict(zip(names, stream.facts[time, patch].tolist(), strict=True))
        thing = history.things[stream.owners[time, patch]]
        prior = history.things[thing.number - 1] if thing.number else None
        assert fact["quadrant"] == thing.quadrant
        assert fact["entering"] == (thing.entered == time)
        assert fact["prior_color"] == (prior.color if prior else 8)
        assert fact["prior_shape"] == (prior.shape if prior else 8)
        assert fact["entries"] == sum(other.entered <= time for other in history.things)
        assert fact["alike"] == min(3, sum(other.color == thing.color for other in history.things[: thing.number]))
    assert (stream.facts[~stream.occupied][:, : len(OF_OBJECTS)] == UNKNOWN).all()
    np.testing.assert_array_equal(stream.facts[:, -1, names.index("present")], stream.occupied.sum(1))
    for time in range(64):
        left = [thing for thing in history.things if thing.left is not None and thing.left <= time]
        last = max(left, key=lambda thing: thing.left, default=None)
        told = stream.facts[time, -1, names.index("gone_color") :].tolist()
        assert told == ([last.color, last.shape] if last else [8, 8])


@pytest.mark.parametrize("world", WORLDS)
def test_vision_labels_match_the_frames(world):
    frames, labels = make_frames([0], WORLDS[world][0])
    assert frames.shape[0] == labels.shape[0] == 128
    assert ((labels[..., 0] == EMPTY) == (labels[..., 1] == EMPTY)).all()
    patches, things = (labels[..., 0] != EMPTY).sum(1), labels[:, -1, 3]
    assert (patches >= things).all()
    assert world == "photo" or (patches == things).all(), "one patch each"
    assert ((patches > 0) == (things > 0)).all()


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


def test_evaluation_counts_blocks_and_clusters(checkpoint):
    model = Trainer(seed=0).model
    results = evaluate(model, streams=2, frames=16)
    assert set(results) <= set(KINDS)
    assert results["now_count"].count == 4
    assert len(right_answers(model, held_out_batch([[9]], 8))) == len(held_out_batch([[9]], 8).kinds[0])


def test_settings_leave_time_for_the_decoder(tmp_path):
    with pytest.raises(ValueError, match="leave none for the decoder"):
        TrainSettings(tmp_path, minutes=2)
