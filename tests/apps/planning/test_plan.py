"""`edgevlm plan`: what it says is monotonic, and its boundary is exact."""

import json
import runpy
from itertools import pairwise
from pathlib import Path

import pytest
from planned import SMALL, make_line, roofline, with_figures
from typer.testing import CliRunner

from edgevlm.apps.planning.plan import PlanRequest, checkpoints, choose, make_plan
from edgevlm.cli import app
from edgevlm.engines.devices import device_names, load_device
from edgevlm.errors import UserError
from edgevlm.runtime.session import Session

JETSONS = [name for name in device_names() if name.startswith("orin")]


# What binds, and the boundary.


@pytest.mark.parametrize("device", ["orin-nano-8", "orin-nx-8", "cpu"])
@pytest.mark.parametrize("fps", [0.1, 0.3])
def test_the_largest_budget_fits_and_one_token_more_does_not(device, fps):
    line = roofline(device, "int4", "fp32")
    budget = line.largest_budget(8, fps)
    assert budget > SMALL.least_budget
    assert line.can_run(budget, 8, fps)
    assert not line.can_run(budget + 1, 8, fps)


# Monotonic in every argument.


@pytest.mark.parametrize("device", device_names())
def test_more_budget_is_more_memory_and_less_speed(device):
    line = roofline(device)
    budgets = range(1000, 9000, 500)
    memories = [line.memory(budget, 8) for budget in budgets]
    speeds = [line.speed(budget, 8) for budget in budgets]
    assert all(a.total < b.total and a.kv < b.kv for a, b in pairwise(memories))
    assert all(a.prefill_fps > b.prefill_fps and a.tokens_per_s > b.tokens_per_s for a, b in pairwise(speeds))
    assert all(a.ttft_ms < b.ttft_ms and a.j_per_frame < b.j_per_frame for a, b in pairwise(speeds))


def test_cameras_share_weights_and_time_and_the_most_of_them_is_exact():
    device = with_figures(load_device("orin-nx-16"), system_mib=12000)
    asked = {"budget": 2000, "precision": "int4", "kv": "fp16", "fps": 0.5}
    lines = [choose(SMALL, device, PlanRequest("a model", cameras=count, **asked)).line() for count in (1, 2, 5)]
    assert len({line["weights_mb"] for line in lines}) == len({line["prefill_fps"] for line in lines}) == 1
    one, two, five = (line["total_mb"] for line in lines)
    assert two - one == pytest.approx(lines[0]["camera_mb"], abs=0.2)
    assert five - two == pytest.approx(3 * lines[0]["camera_mb"], abs=0.3)
    assert [line["camera_fps"] for line in lines] == [pytest.approx(lines[0]["prefill_fps"] / n, abs=1e-3) for n in (1, 2, 5)]
    most = lines[0]["largest_cameras"]
    edge = [choose(SMALL, device, PlanRequest("a model", cameras=count, **asked)) for count in (most, most + 1)]
    assert [plan.fits and plan.keeps_up for plan in edge] == [True, False]
    run = choose(SMALL, device, PlanRequest("a model", **asked)).line()
    assert (run["snapshots_mb"], run["cameras"], run["largest_cameras"]) == (0, 1, most)


# The command.


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments])


def test_json_has_the_fields_of_a_plan_in_order():
    done = run("demo", "--device", "orin-nano-8", "--budget", "1k", "--json")
    assert done.exit_code == 0
    line = json.loads(done.stdout)
    assert tuple(line)[2:12] == (
        "weights_mb", "kv_mb", "activations_mb", "total_mb", "fits", "prefill_fps", "ttft_ms", "tokens_per_s", "j_per_frame",
        "bound_by",
    )  # fmt: skip
    assert line["budget"] == 1000
    assert line["fits"] is line["keeps_up"] is True
    parts = ("weights", "kv", "policy", "activations", "vision", "runtime")
    assert line["total_mb"] == pytest.approx(sum(line[f"{part}_mb"] for part in parts), abs=0.5)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"device": "orin-nano"}, "did you mean"),
        ({"device": "cpu", "precision": "fp8"}, "unknown --precision 'fp8'"),
        ({"device": "cpu", "kv": "fp8"}, "--kv 'fp8' is not supported"),
        ({"device": "cpu", "fps": 0.0}, "--fps must be above 0"),
        ({"device": "cpu", "budget": 10}, "a budget of 10 tokens is not supported by"),
        ({"device": "cpu", "budget": 10**7}, "its positions allow"),
    ],
)
def test_what_cannot_be_planned_is_one_line(asked, says):
    with pytest.raises(UserError, match=says) as error:
        make_line(**asked)
    assert "\n" not in str(error.value)


# `edgevlm models`.

ROOT = Path(__file__).parents[3]
PARAMETERS = {  # as the hub counts a checkpoint's tensors
    "HuggingFaceTB/SmolVLM2-256M-Video-Instruct": 256_484_928,
    "HuggingFaceTB/SmolVLM2-500M-Video-Instruct": 507_482_304,
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct": 2_246_784_880,
    "llava-hf/llava-1.5-7b-hf": 7_063_427_072,
    "Qwen/Qwen2-VL-2B-Instruct": 2_208_985_600,
    "Qwen/Qwen2-VL-7B-Instruct": 8_291_375_616,
    "Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
}


def test_sizes_are_the_hubs():
    found = {checkpoint.name: checkpoint.parameters for checkpoint in checkpoints()}
    assert {name: found[name] for name in PARAMETERS} == pytest.approx(PARAMETERS, rel=0.002)


def test_tables_in_documents_are_what_the_plan_says():
    made = runpy.run_path(str(ROOT / "docs" / "plan_tables.py"))
    for document in made["DOCUMENTS"]:
        text = document.read_text(encoding="utf-8")
        assert made["filled"](text) == text, f"{document.name}: run python docs/plan_tables.py"
        assert made["MARKED"].search(text)


def test_it_says_what_the_longest_question_takes():
    taken, now = [], "how many objects are there now?"
    with Session.open("demo", policy="infinipot-v") as session:
        stream, read = session._stream, session._stream.append_question
        stream.append_question = lambda rows: (taken.append(stream.cache.nbytes), read(rows))[1]
        unit = len(session.chat.suffix([], f"{now} {now}")) - len(session.chat.suffix([], now))
        session.ask(" ".join([now] * (session.max_question_tokens // unit))).wait()
    planned = 1e6 * make_plan(PlanRequest("demo")).line()["question_mb"]
    assert 0.95 * planned < taken[0] <= 1.001 * planned
