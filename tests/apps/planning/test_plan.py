"""`edgevlm plan`: what it says is monotonic, its boundary is exact, and its formulas are those of slow sums."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from typer.testing import CliRunner

from edgevlm.apps.cli import app
from edgevlm.apps.plan import FIRST, PlanRequest, default_budget, make_plan
from edgevlm.apps.planning.memory import activation_bytes, arena_bytes, memory_of, policy_bytes, rows_at_once
from edgevlm.apps.planning.published import EDGE_LLM, qwen2_5_3b, qwen3, rows
from edgevlm.apps.planning.solve import can_run, fits, largest, largest_budget
from edgevlm.apps.planning.speed import BANDWIDTH_EFFICIENCY, COMPUTE_EFFICIENCY, QUESTION, Roofline, speed_of
from edgevlm.apps.planning.weights import BUNDLES, ENGINES, blocks_of, matrices_in, weights_of
from edgevlm.engines.devices import Figure, device_names, load_device
from edgevlm.errors import UserError
from edgevlm.runtime.cache import KVCache

MODEL, SMALL = qwen3("Qwen3-VL-4B"), qwen3("Qwen3-VL-2B")
JETSONS = [name for name in device_names() if name.startswith("orin")]


def roofline(device="orin-nx-16", precision="int4", kv="fp16", model=SMALL):
    return Roofline(model, load_device(device), precision, kv)


def with_figures(device, **values):
    figures = {name: replace(device.figures[name], value=value) for name, value in values.items()}
    return replace(device, figures={**device.figures, **figures})


# Memory.


@pytest.mark.parametrize("kv", ["fp32", "fp16"])
@pytest.mark.parametrize("model", [qwen2_5_3b(), replace(SMALL, axes=1)])
def test_the_arena_is_the_one_that_a_cache_would_allocate(kv, model):
    small = replace(model, layers=2, limit=2048)
    capacity = small.prefix + 600 + 3 * 128 + small.closing
    cache = KVCache(2, small.kv_heads, small.head_dim, capacity, inv_freq=np.ones(64), axes=small.axes, dtype=kv)
    assert arena_bytes(small, 600, kv) == cache.nbytes


def test_int8_keys_are_half_of_float16_ones():
    numbers = 2 * SMALL.layers * SMALL.kv_heads * SMALL.head_dim
    saved = arena_bytes(SMALL, 6000, "fp16") - arena_bytes(SMALL, 6000, "int8")
    assert saved == numbers * SMALL.capacity(6000) - 4 * numbers


def test_bytes_of_a_rounded_weight_are_those_of_its_blocks():
    codes, scales, zeros = 32 * 4 // 8, 4, 4 / 8
    assert BUNDLES["int4"].matrix == (codes + scales) / 32 == 5 / 8
    assert BUNDLES["int4-zp"].matrix == (codes + scales + zeros) / 32
    assert ENGINES["int4"].matrix == (codes + 2) / 32 == 4.5 / 8
    assert BUNDLES["int8"].table == BUNDLES["int4"].table == (32 + scales) / 32
    assert blocks_of(8, 2) == 1.0625


@pytest.mark.parametrize("kind", ["cpu", "jetson"])
def test_fewer_bits_take_less_and_a_head_of_its_own_takes_more(kind):
    totals = [weights_of(MODEL, precision, kind).total for precision in ("int4", "int4-zp", "int8", "fp16", "fp32")]
    assert totals == sorted(set(totals))
    untied = weights_of(replace(MODEL, tied=False), "int4", kind)
    assert untied.total - weights_of(MODEL, "int4", kind).total == untied.head == untied.embedding


@pytest.mark.parametrize("precision", BUNDLES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_bundles_matrices_are_as_many_as_went_into_it(precision, tied):
    bare = replace(MODEL, vectors=0, tied=tied)
    stored = weights_of(bare, precision, "cpu")
    found = matrices_in(stored.layers + stored.head, 0 if tied else bare.table, precision)
    assert found == pytest.approx(bare.matrices, rel=1e-6)


def test_a_rounded_bundle_can_only_be_planned_as_it_is():
    files = {"decoder": 100, "embedding": 20, "vision": 30}
    bundle = replace(MODEL, files=files, precision="int8")
    assert weights_of(bundle, "int8", "cpu").total == 150
    with pytest.raises(UserError, match="is a bundle of int8 weights; give that --precision, or plan its checkpoint"):
        weights_of(bundle, "int4", "cpu")


def test_a_call_is_a_chunk_or_what_the_budget_leaves_of_it():
    rows_per_grid = SMALL.tower.rows
    assert rows_at_once(SMALL, 6000, 8) == 4 * rows_per_grid
    assert rows_at_once(SMALL, 2 * rows_per_grid, 8) == 2 * rows_per_grid
    assert rows_at_once(SMALL, 6000, 1) == rows_per_grid
    once, twice = (activation_bytes(SMALL, 100, "cpu", repeated) for repeated in (False, True))
    assert twice - once == 4 * 100 * (6 * SMALL.inner + 3 * SMALL.hidden)


# Speed, against sums written out.


def test_a_token_takes_as_long_as_its_bytes_take_to_be_read():
    device, weights, held = load_device("orin-nx-16"), weights_of(SMALL, "int4", "jetson"), 1000
    cache = sum(2 * SMALL.kv_heads * SMALL.head_dim * 2 * held for _ in range(SMALL.layers))
    seconds = (weights.layers + weights.embedding + cache) / (device["bandwidth_gb_s"] * 1e9 * BANDWIDTH_EFFICIENCY)
    call = roofline().token(held)
    assert call.term == "memory bandwidth"
    assert call.seconds == pytest.approx(seconds)


def test_a_prefill_takes_as_long_as_its_products():
    held, count = 500, 292
    operations = 0.0
    for row in range(count):
        operations += 2 * SMALL.matrices
        operations += sum(4 * SMALL.heads * SMALL.head_dim * (held + row + 0.5) for _ in range(SMALL.layers))
    operations += 2 * SMALL.vocab * SMALL.hidden
    call = roofline().prefill(count, held, logits=True)
    assert call.term == "compute"
    assert call.seconds == pytest.approx(operations / (15e12 * COMPUTE_EFFICIENCY))


def test_a_tower_takes_as_long_as_its_products():
    tower = SMALL.tower
    block = 4 * 1024 * 1024 + 2 * 1024 * 4096 + 4 * 1024 + 4096 + 1024
    pairs = 2 * 2 * tower.patches * tower.patches * 1024
    merger = 4096 * 4096 + 4096 + 4096 * 2048 + 2048
    operations = 24 * (2 * block * tower.patches + pairs) + 2 * 4 * merger * tower.tokens
    assert roofline().vision().seconds == pytest.approx(operations / (15e12 * COMPUTE_EFFICIENCY))


def test_a_frame_is_its_share_of_a_grid_and_energy_its_time_at_full_power():
    line = roofline()
    speed = speed_of(line, 6000, 8)
    parts = speed.vision_ms + speed.prefill_ms + speed.compression_ms
    assert 1e3 / speed.prefill_fps == pytest.approx(parts)
    assert speed.vision_ms == pytest.approx(1e3 * line.vision().seconds / 2)
    assert speed.j_per_frame == pytest.approx(25 / speed.prefill_fps)
    assert speed.ttft_ms == pytest.approx(1e3 * line.prefill(QUESTION, 6000 + SMALL.prefix, logits=True).seconds)


def test_the_published_figures_are_all_compared_and_nothing_is_far_off_but_eager_pytorch():
    found = list(rows())
    assert len(found) == 3 * len(EDGE_LLM) + 2
    assert [row.published for row in found[:3]] == [39.0, 50.0, 98.4]
    assert all(abs(row.error) < 0.35 for row in found[:-2])
    assert found[-2].error > 1, "eager PyTorch reads weights far slower than memory gives them"
    assert found[-1].planned < 11.3


# What binds, and the boundary.


def test_each_term_binds_where_it_should():
    assert speed_of(roofline(), 6000, 8).bound_by == "compute"
    slow = with_figures(load_device("orin-nx-16"), bandwidth_gb_s=1)
    assert speed_of(replace(roofline(), device=slow), 6000, 1).bound_by == "memory bandwidth"
    wide = replace(SMALL.tower, patches=40 * SMALL.tower.patches)
    assert speed_of(roofline(model=replace(SMALL, tower=wide)), 6000, 8).bound_by == "vision"
    large = make_line(model=qwen3("Qwen3-VL-8B"), device="orin-nano-8", precision="fp16")
    assert (large["fits"], large["bound_by"], large["largest_budget"], large["largest_fps"]) == (False, "memory size", 0, 0.0)


def make_line(model=SMALL, **asked):
    from edgevlm.apps import plan as command

    saved, command.model_of = command.model_of, lambda name, camera: model
    try:
        return make_plan(PlanRequest("a model", **asked)).line()
    finally:
        command.model_of = saved


@pytest.mark.parametrize("device", ["orin-nano-8", "orin-nx-8", "cpu"])
@pytest.mark.parametrize("fps", [0.1, 0.3])
def test_the_largest_budget_fits_and_one_token_more_does_not(device, fps):
    line = roofline(device, "int4", "fp32")
    budget = largest_budget(line, 8, fps)
    assert budget > SMALL.least_budget
    assert can_run(line, budget, 8, fps)
    assert not can_run(line, budget + 1, 8, fps)


def test_memory_itself_is_filled_to_the_last_token():
    line = replace(roofline(), device=with_figures(load_device("orin-nx-8"), system_mib=4000))
    budget = largest_budget(line, 8, 1e-6)
    of = [memory_of(SMALL, line.device, "int4", "fp16", tokens, 8) for tokens in (budget, budget + 1)]
    assert [fits(line, memory) for memory in of] == [True, False]
    assert of[1].total > line.device.usable_bytes >= of[0].total


def test_the_largest_rate_is_kept_up_with_and_no_more():
    line = make_line(device="orin-nx-16", budget=4000)
    rate = speed_of(roofline(), 4000, 8).prefill_fps
    assert line["largest_fps"] == round(rate, 3)
    assert can_run(roofline(), 4000, 8, rate)
    assert not can_run(roofline(), 4000, 8, np.nextafter(rate, np.inf))


def test_positions_bound_a_budget_too():
    short = replace(SMALL, limit=4096)
    assert largest_budget(roofline("orin-agx-64", model=short), 8, 0.1) == short.most_budget == 4096 - 32 - 3 * 256


@pytest.mark.parametrize(
    ("least", "most", "last"), [(1, 100, 37), (1, 100, 100), (1, 100, 1), (5, 5, 5), (1, 100, 0), (9, 3, 99)]
)
def test_bisection_finds_what_a_search_finds(least, most, last):
    holds = [number for number in range(least, most + 1) if number <= last]
    assert largest(least, most, lambda number: number <= last) == (max(holds) if holds else 0)


# Monotonic in every argument.


@pytest.mark.parametrize("device", device_names())
def test_more_budget_is_more_memory_and_less_speed(device):
    line = roofline(device)
    budgets = range(1000, 9000, 500)
    memories = [memory_of(SMALL, line.device, "int4", "fp16", budget, 8) for budget in budgets]
    speeds = [speed_of(line, budget, 8) for budget in budgets]
    assert all(a.total < b.total and a.kv < b.kv for a, b in pairwise(memories))
    assert all(a.prefill_fps > b.prefill_fps and a.tokens_per_s > b.tokens_per_s for a, b in pairwise(speeds))
    assert all(a.ttft_ms < b.ttft_ms and a.j_per_frame < b.j_per_frame for a, b in pairwise(speeds))


@pytest.mark.parametrize("device", JETSONS)
def test_wider_numbers_are_more_memory_and_fewer_tokens(device):
    lines = [roofline(device, precision) for precision in ("int4", "int8", "fp16", "fp32")]
    totals = [memory_of(SMALL, line.device, line.precision, "fp16", 4000, 8).total for line in lines]
    tokens = [speed_of(line, 4000, 8).tokens_per_s for line in lines]
    assert totals == sorted(totals)
    assert tokens == sorted(tokens, reverse=True)
    caches = [arena_bytes(SMALL, 4000, kv) for kv in ("int8", "fp16", "fp32")]
    assert caches == sorted(caches)
    assert policy_bytes(SMALL, 4000) < policy_bytes(SMALL, 4001)


def test_a_chunk_of_more_frames_takes_more_memory_and_no_more_time_a_frame():
    line = roofline("cpu", "fp32", "fp32")
    chunks = (2, 4, 8, 16, 32)
    memories = [memory_of(SMALL, line.device, "fp32", "fp32", 6000, chunk) for chunk in chunks]
    assert all(a.vision < b.vision and a.activations <= b.activations for a, b in pairwise(memories))
    rates = [speed_of(line, 6000, chunk).prefill_fps for chunk in chunks]
    assert rates == sorted(rates)


def test_asking_for_more_frames_leaves_a_smaller_budget():
    budgets = [largest_budget(roofline("orin-nano-8"), 8, fps) for fps in (0.1, 3.0, 5.0, 50.0)]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] > budgets[2]
    assert budgets[-1] == 0


@pytest.mark.parametrize("figure", ["bandwidth_gb_s", "fp16_tflops"])
def test_a_faster_device_is_no_slower(figure):
    line = roofline()
    faster = replace(line, device=with_figures(line.device, **{figure: 2 * line.device[figure]}))
    slow, fast = (speed_of(of, 6000, 8) for of in (line, faster))
    assert fast.prefill_fps >= slow.prefill_fps
    assert fast.tokens_per_s >= slow.tokens_per_s
    assert (fast.prefill_fps, fast.tokens_per_s) != (slow.prefill_fps, slow.tokens_per_s)
    assert isinstance(line.device.figures[figure], Figure)


# The command.


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments])


def test_json_has_the_fields_of_a_plan_in_order():
    done = run("demo", "--device", "orin-nano-8", "--budget", "1k", "--json")
    assert done.exit_code == 0
    line = json.loads(done.stdout)
    assert tuple(line)[: len(FIRST)] == FIRST == (
        "weights_mb", "kv_mb", "activations_mb", "total_mb", "fits", "prefill_fps", "ttft_ms", "tokens_per_s", "j_per_frame",
        "bound_by",
    )  # fmt: skip
    assert line["budget"] == 1000
    assert line["fits"] is line["keeps_up"] is True
    parts = ("weights", "kv", "policy", "activations", "vision", "runtime")
    assert line["total_mb"] == pytest.approx(sum(line[f"{part}_mb"] for part in parts), abs=0.5)


def test_a_person_reads_what_fits_and_what_binds():
    text = run("demo", "--device", "orin-nano-super").stdout
    assert "Jetson Orin Nano 8 GB in Super mode: fp32 weights, fp16 cache" in text
    assert "fits in" in text
    assert "bound by" in text
    assert "largest     budget" in text


def test_defaults_are_a_runs():
    assert make_line(device="orin-nx-16")["precision"] == "int4"
    assert make_line(device="cpu")["precision"] == make_line(device="cpu")["kv"] == "fp32"
    assert default_budget(SMALL) == 6000 // SMALL.tower.rows * SMALL.tower.rows
    assert default_budget(replace(SMALL, limit=4000)) == 2000 // SMALL.tower.rows * SMALL.tower.rows


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"device": "orin-nano"}, "nearest known is"),
        ({"device": "cpu", "precision": "fp8"}, "cpu cannot run fp8 weights"),
        ({"device": "cpu", "kv": "fp8"}, "--kv 'fp8' is not known"),
        ({"device": "cpu", "fps": 0.0}, "--fps must be above 0"),
        ({"device": "cpu", "budget": 10}, "a budget of 10 tokens does not suit"),
        ({"device": "cpu", "budget": 10**7}, "leave room for"),
    ],
)
def test_what_cannot_be_planned_is_one_line(asked, says):
    with pytest.raises(UserError, match=says) as error:
        make_line(**asked)
    assert "\n" not in str(error.value)


def test_a_folder_that_is_no_model_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"config\.json: is missing"):
        make_plan(PlanRequest(str(tmp_path), "cpu"))
    with pytest.raises(UserError, match="does not exist"):
        make_plan(PlanRequest(str(tmp_path / "none"), "cpu"))


def test_published_figures_are_printed_with_their_errors():
    lines = [json.loads(line) for line in run("--published", "--json").stdout.splitlines()]
    assert {line["device"] for line in lines} == {"orin-agx-64", "orin-nx-16", "orin-nano-8"}
    assert all(line["error"] == pytest.approx(line["planned"] / line["published"] - 1, abs=0.01) for line in lines)


def test_only_a_bundle_on_a_cpu_can_be_measured():
    done = run("demo", "--device", "orin-nx-8", "--measure")
    assert isinstance(done.exception, UserError)
    assert "--measure runs demo or a bundle on this CPU" in str(done.exception)
