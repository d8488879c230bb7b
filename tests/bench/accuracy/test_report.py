"""From planted records to rows: which kinds enter, quarters, pairing, the best oracle, what is named as missing."""

import pytest

from edgevlm.bench.accuracy.report import report_lines
from edgevlm.calib.accuracy.compare import Comparison
from edgevlm.calib.accuracy.variants import SkippedRun, VariantRun
from edgevlm.calib.accuracy.worker import AccuracySettings

STREAMS = 10


def result(kind, right, quarter=1, held=0.5):
    return {"kind": kind, "right": right, "quarter": quarter, "held": held, "any": 1.0, "ttft_ms": 2.0}


def records(right):
    """``right(stream)``: of now_count, first_color, past_seen and before."""
    made = []
    for stream in range(STREAMS):
        now, first, seen, weak = right(stream)
        results = [
            result("now_count", now, 4),
            result("first_color", first, 1),
            result("past_seen", seen, 3) if stream % 2 else result("past_seen", seen, None, None),
            result("before", weak, 2),
        ]
        taken = {"tokens": 32, "compress_ms": 4.0, "compressions": 3, "bytes": 1000 + stream}
        made.append({**taken, "results": results})
    return made


@pytest.fixture(scope="module")
def report():
    right = {
        VariantRun("full", "100%", 128): lambda s: (True, True, s > 0, s > 1),
        VariantRun("oracle/newest", "25%", 32): lambda s: (True, s > 2, True, False),
        VariantRun("oracle/spread", "25%", 32): lambda s: (True, s > 1, True, False),
        VariantRun("ours", "25%", 32, 2000): lambda s: (True, s > 4, True, False),
        VariantRun("theirs", "25%", 30, 2000): lambda s: (True, s > 6, s % 2 == 0, True),
        VariantRun("ours", "50%", 64, 3000): lambda s: (True, True, True, True),
    }
    skipped = [SkippedRun("tiny", "3%", "less than a frame")]
    by_run = {run: records(of) for run, of in right.items()}
    return list(report_lines(Comparison(AccuracySettings(frames=8), list(by_run), skipped, by_run), "theirs"))


def lines_of(report, policy, budget="25%"):
    lines = [line for line in report if (line["policy"], line["budget"]) == (policy, budget)]
    return {line["kind"]: line for line in lines if "kind" in line}


def test_only_kinds_that_full_answers_enter_and_the_others_are_named(report):
    assert [(line["kind"], line["accuracy"], line["streams"]) for line in report if "left_out" in line] == [("before", 0.8, 10)]
    assert "before" not in lines_of(report, "ours")
    assert lines_of(report, "ours")["past_seen"]["accuracy"] == 1
    assert lines_of(report, "oracle")["backward"]["oracles"] == {"oracle/newest": 0.85, "oracle/spread": 0.9}


def test_aggregates_quarters_and_kinds(report):
    kinds = lines_of(report, "ours")
    assert kinds["now"]["accuracy"] == 1
    assert (kinds["backward"]["accuracy"], kinds["backward"]["questions"], kinds["backward"]["streams"]) == (0.75, 20, 10)
    assert (kinds["backward/q1"]["accuracy"], kinds["backward/q1"]["questions"]) == (0.5, 10)
    assert (kinds["backward/q3"]["accuracy"], kinds["backward/q3"]["streams"]) == (1, 5)
    assert "backward/q2" not in kinds, "its only kind is left out"
    assert kinds["first_color/q1"]["accuracy"] == kinds["first_color"]["accuracy"] == 0.5
    assert not any(kind.startswith("now_count/") for kind in kinds)
    assert kinds["backward"]["evidence_held"] == 0.5
    assert (kinds["backward"]["bytes"], kinds["backward"]["tokens"]) == (1009, 32)


def test_differences_are_paired_with_the_policy_named(report):
    ours = lines_of(report, "ours")["backward"]
    assert (ours["against"], ours["difference"]) == ("theirs", pytest.approx((15 - 8) / 20))
    assert ours["difference_low"] > 0
    assert lines_of(report, "theirs")["backward"]["difference"] is None
    assert lines_of(report, "ours", "50%")["backward"]["difference"] is None, "it is not there at this budget"
