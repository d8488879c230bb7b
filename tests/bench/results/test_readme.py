"""README's tables between bench marks are what docs/results.jsonl gives."""

from pathlib import Path

import pytest

from edgevlm.bench.results.journal import read_runs, runs_of
from edgevlm.bench.results.readme import MARKED, filled, rewrite
from edgevlm.errors import UserError

ROOT = Path(__file__).parents[3]
README, RESULTS = ROOT / "README.md", ROOT / "docs/results.jsonl"


def test_readme_is_what_the_results_give():
    text = README.read_text()
    assert [name for _, name, _, _ in MARKED.findall(text)] == ["decode", "stream"]
    assert filled(text, read_runs([RESULTS])) == text


def test_the_results_say_what_they_are_from():
    for run in read_runs([RESULTS]):
        assert run.section("machine")["cpu"]
        assert run.section("versions")["onnxruntime"]
        assert all(entry.command.startswith("edgevlm bench ") for entry in run.entries.values())


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
        grown("full", 64, cache_mb=4.2, compress_share=0.0), grown("full", 256, oom=True, stopped="memory"),
        grown("h2o", 64, cache_mb=4.2, compress_share=0.5), grown("h2o", 256, cache_mb=4.857, compress_share=0.123),
        grown("h2o", 256, cache_mb=9, compress_share=0.9, chunk=16), grown("purekv", 256, oom=False, stopped="positions"),
    ]  # fmt: skip
    assert filled("<!-- bench: stream -->\n<!-- /bench -->", runs_of(lines, "-")).splitlines()[1:-1] == [
        "| policy | 64 frames, MB | 256 frames, MB | compression, % |", "|---|---|---|---|", "| `full` | 4.20 | OOM | 0.0 |",
        "| `h2o` | 4.20 | 4.86 | 12.3 |", "| `purekv` | - | stopped | - |",
    ]  # fmt: skip


def test_a_mark_without_results_or_of_another_name_is_refused():
    with pytest.raises(UserError, match="no lines for this table"):
        filled("<!-- bench: stream -->\n<!-- /bench -->", runs_of(LINES, "-"))
    with pytest.raises(UserError, match="there is no such table; there is decode, stream"):
        filled("<!-- bench: speed -->\n<!-- /bench -->", runs_of(LINES, "-"))
