"""``edgevlm bench vrex``: what it prints, and ratios that were measured."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from edgevlm.bench.vrex.paper import load_paper
from edgevlm.bench.vrex.ratios import read_ratios
from edgevlm.cli import app
from edgevlm.errors import UserError

DOCUMENT = Path(__file__).parents[3] / "docs" / "internals" / "vrex.md"


def run(*arguments):
    done = CliRunner().invoke(app, ["bench", "vrex", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def lines(*arguments):
    return [json.loads(text) for text in run("--json", *arguments).splitlines()]


def frame_ms(found, system, length=40_000):
    (line,) = [
        line for line in found if line["bench"] == "vrex-latency" and (line["system"], line["length"]) == (system, length)
    ]
    return line["frame_ms"]


def journal(tmp_path, *texts):
    path = tmp_path / "results.jsonl"
    path.write_text("".join(f"{text if isinstance(text, str) else json.dumps(text)}\n" for text in texts))
    return path


def retrieval(policy, prefill, answer):
    return {"bench": "retrieval", "policy": policy, "prefill_ratio": prefill, "answer_ratio": answer}


def test_tables():
    text = run()
    assert text.count("\nFig. ") == len(load_paper().figures) + 2, "and what PCIe cannot bring"
    (line,) = [line for line in text.splitlines() if "40,000     1        437     254" in line]
    assert line.split() == ["Fig.", "13a", "frame_ms", "V-Rex8", "40,000", "1", "437", "254", "+72", "%"]
    assert "fixes utilisation" in text
    assert "ms a token" in text


@pytest.mark.skipif(not DOCUMENT.exists(), reason="the documents are in the source tree only")
def test_the_document_has_what_is_printed():
    assert run().rstrip() in DOCUMENT.read_text()


def test_json():
    found = lines()
    figures = [line for line in found if line["bench"] == "vrex"]
    assert len(figures) == len(load_paper().figures)
    for line in figures:
        assert line["error"] == pytest.approx(line["predicted"] / line["paper"] - 1, abs=2e-3 + 1e-4 / line["paper"])
    assert len(found) - len(figures) == 7 * 5
    assert frame_ms(found, "V-Rex8") == pytest.approx(437.3, abs=0.1)


def test_a_ratio_changes_what_is_fetched_and_no_constant():
    whole, half = frame_ms(lines(), "V-Rex8"), frame_ms(lines("--prefill-ratio", 0.327 / 2), "V-Rex8")
    assert whole - half == pytest.approx(428.605 / 2, abs=0.02)
    assert frame_ms(lines("--prefill-ratio", 0.1), "AGX+ReKV") == frame_ms(lines(), "AGX+ReKV")


def test_measured_ratios(tmp_path):
    texts = [
        "no JSON",
        [],
        retrieval("resv", 0.9, 0.9),
        {"bench": "stream", "policy": "rekv"},
        retrieval("resv:threshold=0.3", 0.2, 0.01),
        retrieval("sliding-window", 1, 1),
        retrieval("rekv", 0.5, 0.3),
    ]
    path = journal(tmp_path, *texts)
    assert read_ratios(path) == {"ReSV": (0.2, 0.01), "ReKV": (0.5, 0.3)}
    found, typed = lines("--ratios", path), lines("--prefill-ratio", 0.2, "--generation-ratio", 0.01)
    assert frame_ms(found, "V-Rex8") == frame_ms(typed, "V-Rex8")
    assert frame_ms(found, "AGX+ReKV") < frame_ms(typed, "AGX+ReKV")
    (token,) = [
        line for line in found if (line.get("system"), line["bench"], line["length"]) == ("V-Rex8", "vrex-latency", 1000)
    ]
    assert (token["prefill_ratio"], token["generation_ratio"]) == (0.2, 0.01)
    assert frame_ms(lines("--ratios", path, "--prefill-ratio", 0.4), "V-Rex8") > frame_ms(found, "V-Rex8")


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ([], "no line of bench retrieval is of infinigen, infinigenp, rekv, resv"),
        ([retrieval("sliding-window", 1, 1)], "no line of bench retrieval"),
        ([retrieval("rekv", 0.5, 0.3), retrieval("resv", 32.7, 0.1)], "line 2: prefill_ratio is 32.7; a ratio is a number"),
        ([retrieval("resv", 0.3, None)], "line 1: answer_ratio is None"),
        ([retrieval("resv", True, 0.1)], "line 1: prefill_ratio is True"),
    ],
)  # fmt: skip
def test_what_are_no_ratios_is_one_line(tmp_path, texts, says):
    with pytest.raises(UserError, match=says) as caught:
        read_ratios(journal(tmp_path, *texts))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_no_text(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_ratios(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x80")
    with pytest.raises(UserError, match="no text"):
        read_ratios(tmp_path / "bytes")
