"""Drawing an answer's tokens: sampling, and answers that are one of several texts."""

import itertools

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from edgevlm.apps.sources import open_source
from edgevlm.errors import UserError
from edgevlm.runtime.model import Model
from edgevlm.runtime.sampling import OneOf, Sampler
from edgevlm.runtime.session import Session

COLOR = "what color is the object?"


@pytest.fixture(scope="module")
def session():
    with Session.open("demo") as opened:
        for frame in itertools.islice(open_source("demo"), 8):
            opened.watch(frame.image, frame.time_s)
        yield opened


@pytest.fixture(scope="module")
def byte_level():
    """A byte-level BPE tokenizer, as Qwen's and SmolVLM's are."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words = ["nobody is there", "nobody comes in", "somebody is there", "yes", "yes it is", "no"] * 4
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<eos>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(words, trainer)
    return tokenizer


def test_the_answer_is_one_of_them_whatever_the_model_would_say(session):
    free = session.ask(COLOR).text.strip()
    for choices in (["Yes", "No"], ["0", "3"], ["top left", "top right", "top"]):
        answer = session.ask(COLOR, choices=choices)
        assert answer.text in choices
        assert answer.finish_reason == "stop"
        assert free not in choices
        assert sum(answer.probabilities.values()) == pytest.approx(1)
        assert max(answer.probabilities, key=answer.probabilities.get) == answer.text


def test_probabilities_are_the_logits_softmax_over_the_choices(session):
    seen = []

    def processor(token_ids, logits):
        seen.append(logits.astype(np.float64))
        return logits

    session.ask(COLOR, logits_processor=processor).wait()
    colors = ["red", "blue", "cyan"]
    logits = seen[0][[session.model.encode(color)[0] for color in colors]]
    expected = np.exp(logits - logits.max())
    answer = session.ask(COLOR, choices=colors)
    assert answer.wait()
    told = answer.probabilities
    np.testing.assert_allclose([told[color] for color in colors], expected / expected.sum(), rtol=1e-5)


def test_choices_of_several_tokens_under_a_byte_level_tokenizer(session, byte_level):
    model = Model(session.model.bundle, session.model.engine, byte_level, session.model.closing)
    choices, random = ["nobody is there", "nobody comes in", "yes", "yes it is", "Ünïcode \N{CAT}"], np.random.default_rng(0)
    stop, said = model.bundle.chat.stop_ids[0], set()
    for _ in range(200):
        one_of, ids = OneOf(model, choices), []
        while not one_of.complete(ids):
            logits = one_of(ids, random.normal(0, 3, byte_level.get_vocab_size()).astype(np.float32))
            assert np.isfinite(logits).any()
            if (token := int(logits.argmax())) == stop:
                break
            ids.append(token)
        assert sum(one_of.probabilities.values()) == pytest.approx(1)
        assert one_of.text(ids) == byte_level.decode(ids).removeprefix(" ")
        said.add(one_of.text(ids))
    assert said == set(choices)


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        (["yes"], "2 to 256"), (["yes"] * 300, "2 to 256"), (["yes", "yes"], "duplicate"), (["yes", "YES"], "the same tokens"),
        (["yes", ""], "tokenizer"), (["yes", "perhaps"], "tokenizer"), (["yes", "<image>"], "the video token"), ("yes", "list"),
        (["no", "yes " * 300], "shorten"),
    ],
)  # fmt: skip
def test_choices_that_cannot_be_are_refused(session, choices, says):
    with pytest.raises(UserError, match=says):
        session.ask(COLOR, choices=choices)


def test_questions_classified_together_have_the_probabilities_of_each_asked_alone(session):
    asked = [(f"is there a {color} {shape} now?", ("yes", "no")) for color in ("red", "blue") for shape in ("square", "star")]
    asked.append((COLOR, ("red", "blue", "cyan")))
    alone = [session.ask(question, choices=choices) for question, choices in asked]
    assert all(answer.wait() for answer in alone)  # an answer's own rows leave the cache when it ends
    before, held = session.stats, [session.cache.held(layer) for layer in range(session.cache.layers)]
    rows = [{name: np.array(part) for name, part in layer.items()} for layer in held]
    for watch in (False, True):
        found = session.classify(asked, watch=watch)
        for one, answer in zip(found, alone, strict=True):
            assert one.probabilities == pytest.approx(answer.probabilities, abs=1e-6)
            assert one.time_s == answer.time_s
            assert one.looked.evidence() == answer.evidence
    assert session.stats.tokens == before.tokens
    for layer, kept in enumerate(rows):
        for name, part in session.cache.held(layer).items():
            np.testing.assert_array_equal(part, kept[name])


def test_frames_of_a_chunk_not_full_enter_once_for_all_questions():
    with Session.open("demo", chunk=8, append="all") as session:
        for frame in itertools.islice(open_source("demo"), 13):
            session.watch(frame.image, frame.time_s)
        asked = [(f"is there a red {shape} now?", ("yes", "no")) for shape in ("square", "star", "ring")]
        alone = [session.classify([each])[0].probabilities for each in asked]
        appended, step = [], session._stream.decoder.step

        def counted(embeds, *rest, **others):
            appended.append(len(embeds))
            return step(embeds, *rest, **others)

        session._stream.decoder.step = counted
        together = session.classify(asked)
        assert [one.probabilities for one in together] == alone
        assert len([rows for rows in appended if rows >= session.model.bundle.vision.tokens_per_frame]) == 1


def test_somebody_s_question_goes_before_the_rest_of_a_watch_s(session, monkeypatch):
    asked = [(f"is there a red {shape} now?", ("yes", "no")) for shape in ("square", "star", "ring")]
    monkeypatch.setattr(type(session.model.scheduler), "urgent_waiting", property(lambda self: True))
    assert len(session.classify(asked, watch=True)) == 1
    assert len(session.classify(asked)) == 3


LOGITS = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32))


def test_the_seed_fixes_the_draws():
    first, second = (Sampler(temperature=1.0, seed=5) for _ in range(2))
    assert [first(LOGITS) for _ in range(50)] == [second(LOGITS) for _ in range(50)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.5, 0.3, 0.15, 0.05]), ({"top_p": 0.75}, [0.625, 0.375, 0, 0]), ({"top_p": 0.4}, [1, 0, 0, 0]),
        ({"top_k": 2}, [0.625, 0.375, 0, 0]), ({"min_p": 0.5}, [0.625, 0.375, 0, 0]), ({"top_k": 1, "min_p": 1}, [1, 0, 0, 0]),
        ({"temperature": 0.25}, [0.879, 0.114, 0.007, 0]),
    ],
)  # fmt: skip
def test_frequencies_are_the_distribution(settings, expected):
    sampler = Sampler(**{"temperature": 1.0, "seed": 0, **settings})
    counts = np.bincount([sampler(LOGITS) for _ in range(4000)], minlength=4) / 4000
    assert np.allclose(counts, expected, atol=0.03)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"temperature": float("nan")}, "temperature"), ({"top_p": float("nan")}, "top_p"), ({"seed": -1}, "seed"),
        ({"top_k": -1}, "top_k"), ({"min_p": 2}, "min_p"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(settings, says):
    with pytest.raises(UserError, match=says):
        Sampler(**settings)


def test_penalties_are_openais_and_log_probabilities_are_of_before_them(session):
    """logits - presence - frequency * count for tokens of the answer so far; transformers' log softmax without either."""
    torch = pytest.importorskip("torch")

    def logits_of(**settings):
        seen = []

        def note(token_ids, logits):
            seen.append(logits.copy())
            forced = np.full_like(logits, -np.inf)
            forced[[7, 7, 9, 7][len(token_ids)]] = 0  # an answer of these tokens, whatever is penalised
            return forced

        answer = session.ask(COLOR, logits_processor=note, max_tokens=4, **settings)
        assert answer.wait()
        return np.stack(seen), answer

    plain, _ = logits_of()
    changed, answer = logits_of(presence_penalty=0.5, frequency_penalty=-0.25, logprobs=3)
    expected = plain.copy()
    for place, counts in enumerate([{}, {7: 1}, {7: 2}, {7: 2, 9: 1}]):
        for token, count in counts.items():
            expected[place, token] -= 0.5 - 0.25 * count
    np.testing.assert_allclose(changed, expected, atol=1e-6)
    wanted = torch.log_softmax(torch.tensor(plain, dtype=torch.float64), -1)
    for place, noted in enumerate(answer.logprobs):
        assert noted.value == pytest.approx(wanted[place, noted.token].item(), abs=1e-5)
        top = wanted[place].topk(3)
        assert [token for token, _ in noted.likeliest] == top.indices.tolist()
        assert [value for _, value in noted.likeliest] == pytest.approx(top.values.tolist(), abs=1e-5)
    with pytest.raises(UserError, match="presence_penalty"):
        session.ask(COLOR, presence_penalty=3)
