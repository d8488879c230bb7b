"""HERMES's own program: what it kept of the same frames (``recorded/hermes.py``)."""

from pathlib import Path

import numpy as np
import pytest
from parity.official import OfficialHermes, projected
from parity.recorded import hermes as recorded

from edgevlm.export import export_checkpoint
from edgevlm.runtime.cache import Kind
from edgevlm.runtime.model import Model
from edgevlm.runtime.session import Session, TextBudget

RECORDED = np.load(Path(__file__).parent / "recorded" / "hermes.npz")
TEXT_BUDGET = TextBudget(16, 64, 8)


@pytest.mark.parametrize("name", recorded.CASES)
def test_keeps_what_the_program_kept(name, tmp_path):
    """Its rows in every layer after every compression, in their order, exactly; its summaries but for float32's rounding."""
    case = recorded.CASES[name]
    rows, summaries, prompts = (RECORDED[f"{name}: {part}"] for part in ("rows", "summaries", "prompts"))
    checkpoint, ahead = case.checkpoint(tmp_path / "checkpoint"), case.frames * recorded.PER_FRAME
    model, policy = (
        Model.load(export_checkpoint(checkpoint, tmp_path / "bundle", kv="fp32"), threads=1),
        OfficialHermes(ahead=ahead),
    )
    with Session.open(
        model,
        append="all",
        policy=policy,
        budget=case.budget + ahead,
        chunk=case.frames,
        reindexing="eager",
        text_budget=TEXT_BUDGET,
    ) as session:
        stream = session._stream
        policy.project = projected(checkpoint, stream)
        assert (session._chat.prefix_text, model.bundle.vision.tokens_per_frame) == (recorded.PREFIX, recorded.PER_FRAME)
        for number, chunk in enumerate(case.features()):
            guidance, before = policy.guidance, stream.stats.compressions
            assert stream.append_frames(chunk) == len(chunk)
            stream.make_room(0)
            if stream.stats.compressions > before:
                _, overall, both = prompts[before]
                assert guidance == (overall, both)
                for layer, expected in enumerate(rows[before]):
                    check_layer(stream, layer, expected, summaries[: before + 1, max(0, layer - case.deep_from)])
            if number + 1 == case.chunks // 2 and case.turn:
                policy.last_turn = "Question: {} Answer: {}".format(*case.turn)
        assert stream.stats.compressions == stream.stats.reindexings == len(rows)
    model.close()


def check_layer(stream, layer, expected, summaries):
    """expected: rows of the vision from the stream's start, summaries as -1, -2, ...; summaries: the layer's so far."""
    cache, prefix = stream.cache, stream.prefix
    order = np.argsort(cache.position(layer)[0, :, 0])
    assert cache.position(layer)[0, order, 0].tolist() == list(range(prefix + len(expected)))
    seq, kind = cache.seq(layer)[:, order[prefix:]], cache.kind(layer)[:, order[prefix:]]
    vision = expected >= 0
    assert (kind == np.where(vision, Kind.VISION, Kind.SUMMARY)).all()
    assert (seq[:, vision] == prefix + expected[vision]).all()
    if not vision.all():
        keys, values = (of[:, order[prefix:]][:, ~vision] for of in (cache.key(layer), cache.value(layer)))
        theirs = summaries[-1 - expected[~vision]]  # keys turn with their row, so only that of the newest is as it was
        np.testing.assert_allclose(values, theirs[:, 1].swapaxes(0, 1), atol=1e-4)
        np.testing.assert_allclose(keys[:, -1], theirs[-1, 0], atol=1e-4)
