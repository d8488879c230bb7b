"""The bench of watches: what it counts."""

from edgevlm.bench import watches
from edgevlm.bench.watches import Score, summed


def test_openings_and_closings_are_compared_with_the_truth():
    score, no, yes = Score(), False, True
    score.add([no, yes, yes, yes, no, no], [no, no, yes, yes, yes, no])
    score.add([no, yes, yes, yes, no, no], [no, yes, no, yes, no, no])
    score.add([yes, yes, no, no], [no, no, no, no])
    score.add([no, no, no, no], [no, yes, no, no])
    assert (score.right, score.missed, score.spurious, score.again, score.delays) == (4, 2, 3, 1, [1, 1, 0, 0])
    line = summed([score, Score(right=7)])
    assert (line["events"], line["event_precision"], line["event_recall"], line["flaps"]) == (13, 11 / 15, 11 / 13, 1)
    assert line["precision_low"] < 11 / 15 < line["precision_high"]
    assert "event_precision" not in summed([Score(missed=3)])


def test_streams_are_watched_until_enough_happened(monkeypatch):
    for name, value in (("RULES", {"default": {}}), ("FRAMES", 24), ("WATCHES", 4)):
        monkeypatch.setattr(watches, name, value)
    found = list(watches.quality(2, "4", append=["auto"]))
    assert [line["policy"] for line in found] == ["auto", "sliding-window", "still"]
    assert found[0]["events"] >= 2
