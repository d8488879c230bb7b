"""Tables in documents are what docs/results.jsonl gives."""

import sys
from pathlib import Path

import pytest

from edgevlm.bench.results.journal import read_runs, runs_of
from edgevlm.errors import UserError

ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "docs"))
import tables  # noqa: E402
from tables import MARKED, filled, markdown, rewrite  # noqa: E402

RESULTS = ROOT / "docs/results.jsonl"
DOCUMENTS = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if MARKED.search(path.read_text())]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_documents_are_what_the_results_give(path):
    text = path.read_text()
    assert filled(text, read_runs([RESULTS])) == text


def test_every_table_stands_in_a_document():
    used = {name for path in DOCUMENTS for _, name, _, _ in MARKED.findall(path.read_text())}
    assert used == {*tables.TABLES}


def test_the_results_say_what_they_are_from():
    for run in read_runs([RESULTS]):
        if run.section("machine"):
            assert run.section("machine")["cpu"]
            assert run.section("versions")["onnxruntime"]
        else:
            assert run.header["note"].startswith("Read from docs/"), "what was read from a plot says so"
        assert all(entry.command.startswith("edgevlm bench ") for entry in run.entries.values())


def rows(table):
    return markdown(table).splitlines()


def token(runtime, kv, ms):
    return {"bench": "decode", "model": "seeded-135m", "runtime": runtime, "precision": "int8", "context": 300, "threads": 1,
            "kv": kv, "ms_per_token": ms}  # fmt: skip


def pair(kv, against_kv, ratio):
    line = {name: value for name, value in token("edgevlm", kv, 0).items() if name != "ms_per_token"}
    return {**line, "against": "llama.cpp", "against_kv": against_kv, "ratio": ratio}


LINES = [
    token("edgevlm", "fp32", 7.05), token("edgevlm", "fp16", 12.0), token("llama.cpp", "fp32", 14.0),
    token("llama.cpp", "fp16", 11.96), pair("fp32", "fp32", 0.7), pair("fp32", "fp16", 0.841), pair("fp16", "fp16", 1.0),
]  # fmt: skip


def test_each_is_taken_with_the_memory_it_is_faster_with(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- bench: decode -->\nold\n<!-- /bench -->\nafter\n")
    assert rewrite(path, runs_of(LINES, "-")) == ["decode"]
    assert path.read_text() == (
        "before\n<!-- bench: decode -->\n| tokens held | threads | int8 |\n|---|---|---|\n"
        "| 300 | 1 | 7.1 / 12.0 = .84 |\n<!-- /bench -->\nafter\n"
    )


def test_a_run_that_was_stopped_before_its_ratios_and_a_later_run(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("<!-- bench: decode -->\n<!-- /bench -->\n")
    runs = [*runs_of(LINES, "first"), *runs_of(LINES[:4], "later")]
    assert rewrite(path, runs) == ["decode"]
    assert "| 300 | 1 | 7.1 / 12.0 |\n" in path.read_text()
    path.write_bytes(b"\xff")
    with pytest.raises(UserError, match="is not UTF-8"):
        rewrite(path, runs)


def grown(policy, frames, **more):
    return {"bench": "stream", "model": "demo", "chunk": 8, "policy": policy, "frames": frames, **more}


def test_a_stream_as_it_grows():
    lines = [
        grown("full", 64, cache_mb=4.2, compress_fraction=0.0), grown("full", 256, oom=True, stopped="memory"),
        grown("h2o", 64, cache_mb=4.2, compress_fraction=0.5), grown("h2o", 256, cache_mb=4.857, compress_fraction=0.123),
        grown("h2o", 256, cache_mb=9, compress_fraction=0.9, chunk=16), grown("purekv", 256, oom=False, stopped="positions"),
    ]  # fmt: skip
    assert filled("<!-- bench: stream -->\n<!-- /bench -->", runs_of(lines, "-")).splitlines()[1:-1] == [
        "| policy | 64 frames, MB | 256 frames, MB | compression, % |", "|---|---|---|---|", "| `full` | 4.20 | OOM | 0.0 |",
        "| `h2o` | 4.20 | 4.86 | 12.3 |", "| `purekv` | - | stopped | - |",
    ]  # fmt: skip


def answered(policy, frames, budget, accuracy, seed="test"):
    return {"bench": "accuracy", "suite": "streamqa", "kind": "backward", "policy": policy, "frames": frames,
            "budget": budget, "seed": seed, "accuracy": accuracy}  # fmt: skip


def test_accuracy_by_frames_and_budget():
    lines = [
        answered("full", 64, "100%", 0.995), answered("h2o", 64, "6.25%", 0.5), answered("h2o", 64, "50%", 0.9449),
        answered("last-seen", 128, "50%", 1.0), answered("h2o", 64, "25%", 0.1, seed=0),
    ]  # fmt: skip
    assert rows(tables.accuracy(lines)) == [
        "| policy | 64: 50 % | 64: 6.25 % | 128: 50 % |", "|---|---|---|---|", "| full KV | 1.00 | 1.00 | - |",
        "| `h2o` | .94 | .50 | - |", "| **`last-seen`** | - | - | 1.00 |",
    ]  # fmt: skip


def test_what_is_appended_stands_beside_whole_frames_in_a_table_of_its_own():
    def lines(append, right, **more):
        name = "h2o" if append == "all" else f"h2o@{append}"
        return [{**answered(name, 64, "12.5%", of), "kind": kind, "append": append, **more} for kind, of in right.items()]

    paired = {"difference": 0.0449, "difference_low": -0.01, "difference_high": 0.1}
    run = lines("all", {"backward": 0.9, "now": 1.0}) + lines("changed:tau=.999", {"backward": 0.945, "now": 0.99}, **paired)
    assert rows(tables.TABLES["accuracy-append"](run))[2:] == ["| `h2o` | .90 | .95 | +.045 [-.010, +.100] | 1.00, .99 |"]
    assert tables.TABLES["accuracy-append-hard"](run)[1] == tables.accuracy(run)[1] == []
    assert tables.TABLES["accuracy-append-small"](run)[1] == []


def long_answers(policy, budget, right, kind="backward", difference=-0.1):
    return {"bench": "accuracy", "suite": "longstream", "seed": "test", "policy": policy, "budget": budget, "kind": kind,
            "frames": 99, "accuracy": right, "ci_low": right - 0.1, "ci_high": right + 0.1, "ttft_ms": 1.25,
            "moved": 2500.0, "against": "last-seen", "difference": difference,
            "difference_low": difference and difference - 0.1, "difference_high": difference and difference + 0.1}  # fmt: skip


def test_long_streams_by_budget_and_by_how_long_ago():
    lines = [
        long_answers("oracle", "ceiling", 1.0), long_answers("last-seen", "64", 0.5), long_answers("last-seen", "128", 0.75),
        long_answers("last-seen", "128", 0.25, "backward/tens"), long_answers("hybrid", "128", 0.8, difference=0.1),
        long_answers("hybrid", "128", 0.5, "backward/tens"), long_answers("hybrid", "128", 0.5, "past_seen"),
        long_answers("oracle", "128", 0.9, difference=None), long_answers("oracle", "128", 0.9, "backward/tens"),
        {**long_answers("h2o", "128", 0.5), "frames": 50},
    ]  # fmt: skip
    assert rows(tables.longstream(lines)) == [
        "| policy | 64 tokens | 128 tokens | - `last-seen`, paired | tens | first token, ms | KB moved |",
        "|---|---|---|---|---|---|---|",
        "| oracle | - | .90 [.80, 1.00] | - | .90 |  |  |",
        "| `hybrid` | - | .80 [.70, .90] | +.10 [.00, +.20] | .50 | 1.2 | 2 |",
        "| `last-seen` | .50 [.40, .60] | .75 [.65, .85] |  | .25 | 1.2 | 2 |",
    ]


def test_a_long_run_has_a_row_a_mark():
    line = {"bench": "longrun", "policy": "resv", "frames": 100_000, "device_bytes": 3_675_628, "host_bytes": 67_274_176,
            "file_bytes": 1_778_384_896, "ttft_ms_p50": 8.138, "ttft_ratio": 0.724, "moved_bytes_per_question": 2_190_405,
            "right": {"tens": "5/6", "thousands": "6/10", "never": "13/13", "now": "2/2"}}  # fmt: skip
    assert rows(tables.TABLES["longrun"]([line]))[2:] == [
        "| `resv` | 100,000 | 3,676 | 67 | 1,778 | 8.1 | .72 | 2,190 | tens 5/6, thousands 6/10 |"
    ]


def test_compression_takes_the_last_of_its_lines():
    place = {"bench": "compression", "policy": "hermes", "threads": 1, "layers": 36, "dtype": "fp32"}
    lines = [
        {**place, "pass_over_read": 1.0, "ms": 2.0},
        {**place, "pass_over_read": 19.4, "ms": 2.0}, {**place, "threads": 2, "pass_over_read": 3.0},
        {**place, "policy": "purekv", "pass_over_read": 3.26, "dtype": "fp16"},
    ]  # fmt: skip
    assert rows(tables.TABLES["compression"](lines)) == [
        "|  | hermes | purekv |", "|---|---|---|", "| over one plain read of the same keys and values, fp32 | 19 | - |",
        "| the same in fp16, which has half the bytes to read | - | 3.3 |",
    ]  # fmt: skip
    assert tables.TABLES["compression"]([]) == ([""], [])


def test_shares_of_a_frame():
    part = {"bench": "breakdown", "model": "demo", "compress_fraction": 0.00321, "frame_ms": 5.0}
    lines = [{**part, "policy": "purekv", "guidance_ms": 0.0}, {**part, "policy": "hermes", "guidance_ms": 1.2}]
    made = rows(tables.TABLES["breakdown"](lines))
    assert made[2:] == [
        "| the demo: compression | 0.32 | 0.32 |",
        "| the demo: guidance | 24 | 0 |",
    ]


def test_a_stream_beside_transformers():
    side = {"bench": "stream-against", "fps": 0.1234, "tokens_per_s": 9.96, "vision_ms": 2000.4, "prefill_ms": 1.0,
            "compress_ms": 0.4}  # fmt: skip
    ours = {**side, "runtime": "edgevlm", "precision": "int8", "vision_precision": "int8"}
    theirs = {**side, "runtime": "transformers", "precision": "fp32", "vision_precision": "fp32"}
    ratio = {**ours, "against": "transformers", "fps_ratio": 3.456, "cpu_ratio": 4.01, "tokens_ratio": 6.0}
    assert rows(tables.against([ours, theirs, ratio]))[2:] == [
        "| edgevlm, int8, int8 tower | 0.123 | 3.46 | 4.01 | 10.0 | 6.00 | 2,000 | 1 | 0 |",
        "| transformers, fp32, fp32 tower | 0.123 | 1 | 1 | 10.0 | 1 | 2,000 | 1 | 0 |",
    ]


def test_what_changes_of_a_clip_beside_whole_frames():
    ones = dict.fromkeys(("appended", "encoded", "fps_ratio", "low", "high", "cpu_ratio", "ceiling"), 1.0)
    line = {"bench": "stream-changed", "model": "seeded-0.5b", "clip": "room", "append": "all", "encode": "all", "fps": 0.12}
    line |= ones
    half = {**line, "encode": "changed", "encoded": 0.191, "fps": 0.3, "fps_ratio": 2.5, "low": 2.25, "high": 2.6}
    both = {**half, "append": "changed:tau=0.99", "appended": 0.25, "fps": 0.6, "fps_ratio": 5.0, "ceiling": 5.5}
    made = tables.TABLES["stream-changed"]([line, half, both, {**both, "model": "demo"}])
    assert rows(made)[2:] == [
        "| still room, drawn | all | changed | 1.00 | .19 | 0.12 | 0.30 | 2.5 [2.2, 2.6] | 1.00 | 1.00 |",
        "| still room, drawn | changed | changed | .25 | .19 | 0.12 | 0.60 | 5.0 [2.2, 2.6] | 1.00 | 5.5 |",
    ]
    short = tables.TABLES["stream-changed-short"]([line, half, both])
    assert rows(short)[2:] == ["| still room, drawn | .25 | .19 | 0.12 | 0.60 | 5.0 [2.2, 2.6] | 5.5 |"]


def test_precisions_a_tower_and_sparse_prefill():
    rounded = {"bench": "precision", "precision": "int4+gptq", "top1": 0.8025, "kl": 0.15741, "decoder_mb": 98.3,
               "size_over_fp32": 0.183}  # fmt: skip
    assert rows(tables.precision([rounded])) == [
        "|  | int4 by GPTQ |", "|---|---|", "| same likeliest token | .803 |", "| mean KL, nats | .1574 |",
        "| decoder, MB (fp32: 537) | 98 |",
    ]  # fmt: skip
    tower = {"bench": "vision", "tower": "siglip-so400m-384", "batch": 1, "against": "transformers", "layers": 27, "threads": 1,
             "precision": "int8", "ratio": 0.345, "low": 0.3, "high": 0.4, "cpu_ratio": 10.034}  # fmt: skip
    made = rows(tables.TABLES["vision"]([tower, {**tower, "layers": 2}]))
    assert made[2:] == ["| siglip-so400m-384 | 1 | int8 | .35 [.30, .40] | 10.03 |"]
    pattern = {"bench": "prefill-pattern", "held": 6144, "dense_ms": 100.4, "st_spattn_ms": 71.6, "ratio": 1.4}
    assert rows(tables.TABLES["prefill-pattern"]([pattern]))[2:] == ["| 6,144 | 100 | 72 | 1.4 |"]


def test_facts_in_text_by_budget():
    """Full KV, which has no budget, first; then those that recall most."""
    line = {"bench": "accuracy", "suite": "text-facts", "seed": "test", "ci_low": 0.2, "ci_high": 0.9}
    lines = [
        {**line, "policy": policy, "budget": budget, "kind": kind, "accuracy": accuracy, "evidence_held": held}
        for policy, budget, far, near, held in [
            ("full", "100%", 0.8, 1.0, 1.0), ("uniform", "12.5%", 0.25, 0.5, 0.1), ("h2o", "12.5%", 0.5, 1.0, 0.125),
        ]
        for kind, accuracy in (("backward", far), ("now", near))
    ]  # fmt: skip
    table = tables.recalled("text-facts", ("far", "near", "held"))
    assert rows(table([*lines, {**lines[0], "policy": "random", "seed": "5"}])) == [
        "| policy | far, 12.5 % | near, 12.5 % | held, 12.5 % |", "|---|---|---|---|",
        "| full KV | .80 [.20, .90] | 1.00 | 1.00 |", "| `h2o` | .50 [.20, .90] | 1.00 | .13 |",
        "| `uniform` | .25 [.20, .90] | .50 | .10 |",
    ]  # fmt: skip


def test_a_mark_without_results_or_of_another_name_is_refused():
    with pytest.raises(UserError, match="no lines for this table"):
        filled("<!-- bench: stream -->\n<!-- /bench -->", runs_of(LINES, "-"))
    with pytest.raises(UserError, match="there is no such table; there is accuracy, accuracy-append, accuracy-append-hard"):
        filled("<!-- bench: speed -->\n<!-- /bench -->", runs_of(LINES, "-"))


def test_answers_that_end_at_once_have_no_rate():
    line = {"bench": "stream-against", "runtime": "edgevlm", "precision": "fp32", "vision_precision": "fp32", "fps": 9.0}
    line |= {"tokens_per_s": None, "vision_ms": 1, "prefill_ms": 2, "compress_ms": 3}
    ratios = {"fps_ratio": 1.0, "cpu_ratio": 1.0, "tokens_ratio": None}
    assert tables.against([line, line | ratios])[1][0][4:6] == ["-", "-"]
