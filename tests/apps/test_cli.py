"""The command as a person and a program use it: exit codes, environment, output that fails, interrupts, completion."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typed import edgevlm, events, of_kind, refused, start

from edgevlm.errors import UserError
from edgevlm.packages import install, needed

COUNT = "how many objects are there now?"


STATS = {
    "event", "schema", "time", "frames", "dropped", "drops", "fps", "policy", "cache_tokens", "cache_bytes",
    "appended", "encoded", "compressions", "compress_ms", "rss_bytes", "source_state", "source_problem", "reconnects",
}  # fmt: skip
ANSWER = {
    "event", "schema", "time", "time_s", "question", "text", "token_ids", "ttft_ms", "tpot_ms", "truth", "evidence",
    "evidence_held", "model_fits_source",
}  # fmt: skip


def test_the_json_of_a_run():
    asked = ("--ask", COUNT, "--ask-at", f"10:{COUNT}", "--ask-at", f"5.4:{COUNT}")
    *lines, summary = events("run", "--frames", 64, *asked, "--json")
    answers = of_kind(lines, "answer")
    assert [answer["time_s"] for answer in answers] == [5.0, 10.0, 32.0], "the frames up to that time and no later"
    for answer in answers:
        assert set(answer) == ANSWER
        assert answer["text"]
        assert answer["ttft_ms"] > 0
    assert (summary["event"], set(summary)) == ("summary", STATS)
    assert (summary["frames"], summary["dropped"], summary["source_state"]) == (64, 0, "ended")


def test_the_demo_without_a_terminal_asks_and_tells_the_truth():
    done = edgevlm("run")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert len(lines) >= 6
    assert all("(truth: " in line for line in lines)
    assert "384 frames" in done.stderr
    assert "· 0 compressions" not in done.stderr, "a memory that is never full shows nothing"


def test_every_question_it_lists_is_one_it_was_taught():
    listed = edgevlm("run", "--questions").stdout.splitlines()
    assert COUNT in listed
    filled = [text.replace("<color>", "red").replace("<shape>", "square") for text in listed]
    answers = of_kind(events("run", "--frames", 4, "--json", *(f"--ask={text}" for text in filled)), "answer")
    assert len(answers) == len(filled)
    assert all(answer["token_ids"] for answer in answers)


MISTAKES = [  # one of each kind
    (["--camera", "0"], "/dev/video0 not found"),
    (["--model", "/nonexistent"], "no such bundle folder; give demo"),
    (["--model", "SmolVLM2"], r"did you mean HuggingFaceTB/SmolVLM2-256M-Video-Instruct\?"),
    (["--budget", "8"], "less than one frame"),
    (["--budget", "1" + 400 * "0"], "--budget '10.*like 512 or 6k"),
    (["--policy", "infinipot"], "did you mean 'infinipot-v'"),
    (["--ask-at", "nan:what?"], "--ask-at nan:what.: give seconds"),
    (["--seconds", "inf"], "--seconds inf: must be 0 or a number from 1e-9 to 1e15"),
    (["--chunk", "0"], "--chunk 0: should be greater than or equal to 1"),
    (["shop.mp4"], r"unexpected argument shop.mp4; did you mean --video shop.mp4\?"),
    (["SmolVLM2"], r"did you mean --model SmolVLM2\?"),
    ([""], "unexpected argument; see edgevlm run --help"),
    (["--video", "a\n\x1b[2Jb.mp4"], r"a \[2Jb.mp4"),
    (["--camera", "http://user:secret@127.0.0.1:9/x"], r"http://\*\*\*@127"),
]


@pytest.mark.parametrize(("arguments", "says"), MISTAKES, ids=lambda value: "" if isinstance(value, str) else value[0])
def test_a_mistake_is_one_line_and_exit_code_2(arguments, says):
    said = refused("run", *arguments)
    assert re.search(says, said)
    assert "secret" not in said


HEAVY = ("numpy", "rich", "edgevlm.runtime.session", "edgevlm.engines", "edgevlm.bench.commands", "edgevlm.apps.run")


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["run", "--help"], ["bench", "--help"]])
def test_version_and_help_load_neither_numpy_nor_any_bench(arguments):
    code = f"import sys\nfrom edgevlm.cli import app\nsys.argv[1:] = {arguments}\ntry:\n app()\nfinally:\n print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    loaded = done.stdout.splitlines()[-1].split()
    heavy = [name for name in HEAVY if name in loaded]
    assert heavy == []


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        (MemoryError("std::bad_alloc"), "not enough memory; stop other programs"),
        (type("PanicException", (BaseException,), {})("range end\nindex"), "a library failed (range end index)"),
    ],
)
def test_too_little_memory_and_a_panic_are_one_line(monkeypatch, raised, line):
    def fails(*_, **__):
        raise raised

    monkeypatch.setattr("edgevlm.runtime.stream.Stream.append_frames", fails)
    done = edgevlm("run", "--frames", "9")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"edgevlm: {line}")


@pytest.mark.parametrize(("command", "lines"), [([], 40), (["run"], 60)])
def test_help_fits_a_screen_of_80_columns(command, lines):
    shown = edgevlm(*command, "--help", COLUMNS="80").stdout.splitlines()
    assert len(shown) <= lines
    assert max(map(len, shown)) <= 80
    assert not any("env var" in line for line in shown), "variables are named once, at the end"


def test_one_that_is_missing_is_named_with_what_installs_it(monkeypatch):
    clone = Path(__file__).resolve().parents[2]
    with pytest.raises(UserError, match=rf"^exporting needs the package nothing_here, .*: pip install -e '{clone}\[gguf\]'$"):
        needed("nothing_here", "exporting", "gguf")
    monkeypatch.setattr("edgevlm.packages.__file__", "/usr/lib/python3/site-packages/edgevlm/packages.py")
    assert install("gguf") == "pip install 'edgevlm[gguf]'"


def test_onnx_runtime_keeps_and_sends_nothing_of_its_own(tmp_path):
    """Its makers' builds keep an id of the machine and send what is run, but not where CI is set."""
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    subprocess.run([sys.executable, "-c", "import edgevlm.engines.onnxruntime_cpu"], env=environment, check=True)
    assert not list(tmp_path.rglob("*"))


def test_every_option_has_a_variable():
    said = {
        "EDGEVLM_RUN_FRAMES": "6",
        "EDGEVLM_RUN_JSON": "1",
        "EDGEVLM_RUN_THREADS": "2",
        "EDGEVLM_RUN_ASK": f"{COUNT}\nwhich shape came first?",
        "EDGEVLM_RUN_ASK_AT": f"1:{COUNT}",
    }
    *found, summary = events("run", **said)
    answers = of_kind(found, "answer")
    assert [answer["question"] for answer in answers] == [COUNT, COUNT, "which shape came first?"]
    assert [answer["time_s"] for answer in answers] == [1.0, 3.0, 3.0]
    assert summary["frames"] == 6


@pytest.mark.parametrize("arguments", [["run", "--json"], ["policies"]])
def test_a_full_stdout_is_one_line_and_exit_code_2(arguments):
    with open("/dev/full", "w") as full:
        process = start(*arguments, stdout=full)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 2
    assert [line for line in said.splitlines() if line.startswith("edgevlm: ") and "No space left" in line]
    assert "Traceback" not in said
    assert "Exception" not in said


@pytest.mark.parametrize("arguments", ["policies", "run --frames 20"])
def test_a_reader_that_has_enough_is_no_failure(arguments):
    command = f"{sys.executable} -m edgevlm {arguments} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "0\n"
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.parametrize(("encoding", "output"), [("utf-8:strict", []), ("ascii", ["--json"])])
def test_characters_that_cannot_be_shown_end_nothing(encoding, output):
    question = "wh\u00e4t \U0001f600 \udce9?"
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    process = start("run", "--frames", 2, "--ask", question, *output, env=environment, text=False)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    if output:
        (answer,) = of_kind(map(json.loads, out.splitlines()), "answer")
        assert answer["question"] == question.replace("\udce9", r"\udce9")


INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
target = sys.argv.pop()
class AtImport:
    def find_spec(self, name, *_):
        if name == target:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, AtImport())
from edgevlm.__main__ import main
main()
"""


@pytest.mark.parametrize("module", ["typer", "numpy", "edgevlm.calib.demo.world"])
def test_an_interrupt_while_it_loads_is_quiet(module):
    process = start("run", module, code=INTERRUPTED)
    assert process.communicate(timeout=120) == ("", "")
    assert process.returncode in (-signal.SIGINT, 130)


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("run --reindexing ", ["lazy", "eager"]), ("run --policy h", ["h2o", "hermes", "hybrid"]),
        ("run --engine tens", ["tensorrt"]), ("plan --device cp", ["cpu"]), ("serve --camera de", ["demo"]),
        ("run --model HuggingFaceTB/SmolVLM2-5", ["HuggingFaceTB/SmolVLM2-500M-Video-Instruct"]),
    ],
)  # fmt: skip
def test_a_shell_completes_options_and_their_values(typed, offered):
    words = {"_EDGEVLM_COMPLETE": "complete_bash", "COMP_WORDS": f"edgevlm {typed}", "COMP_CWORD": "3"}
    command = [sys.executable, "-m", "edgevlm"]
    assert subprocess.check_output(command, env=os.environ | words, text=True).split() == offered
