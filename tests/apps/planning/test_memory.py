"""The plan's memory beside that of real processes: the demo, a tower, a seeded decoder of LLaVA-OneVision-0.5B's widths."""

from collections.abc import Callable
from dataclasses import asdict, replace
from statistics import median

import pytest
from grown import measured_bytes

from edgevlm.apps.planning.formulas import Roofline
from edgevlm.apps.planning.model import plan_checkpoint
from edgevlm.apps.planning.plan import PlanRequest, make_plan
from edgevlm.bench.seeded import SHAPES, decoder_bundle, word_tokenizer
from edgevlm.engines.devices import load_device
from edgevlm.runtime.bundle import FORMAT, MANIFEST, hash_file, seal_manifest

GOAL = 0.05  # what the plan claims, and the slow tests hold
CLEARLY, NEVER = 0.1, 0.15  # a loaded machine takes pages back: past the one it is measured again, past the other it fails


def error(planned: int, measure: Callable[[], int]) -> float:
    """How far the plan is from a process, or from the median of three where it is clearly off the first one."""

    def off(measured: float) -> float:
        return abs(planned / measured - 1)

    taken = [measure()]
    if off(taken[0]) > CLEARLY:
        taken += [measure(), measure()]
    print(f"planned {planned / 1e6:.1f} MB, measured {[round(one / 1e6, 1) for one in taken]} MB")
    return off(median(taken))


def bundle_error(name, budget, chunk):
    plan = make_plan(PlanRequest(str(name), "cpu", budget=budget, precision="fp32", chunk=chunk))
    return error(plan.memory.total, lambda: measured_bytes(plan.roofline.model, str(name), budget, chunk))


def tower_error(made, chunk):
    model = plan_checkpoint(made.checkpoint, (480, 640))
    budget = 8 * model.tower.rows
    planned = Roofline(model, load_device("cpu"), "fp32", "fp32").memory(budget, chunk)
    assert planned.vision > 0.15 * planned.total
    return error(planned.total, lambda: measured_bytes(model, str(made.bundle), budget, chunk))


@pytest.fixture(scope="module")
def seeded(tmp_path_factory):
    """A whole bundle of four layers, 60 MB each, as ``edgevlm export`` would leave it."""
    folder = tmp_path_factory.mktemp("seeded")
    bundle = decoder_bundle(folder, replace(SHAPES["seeded-0.5b"][1], layers=4), 49)
    word_tokenizer().save(str(folder / "tokenizer.json"))
    files = {path.name: asdict(hash_file(path)) for path in sorted(folder.iterdir())}
    sections = {
        "decoder": asdict(bundle.decoder),
        "vision": asdict(bundle.vision),
        "chat": asdict(bundle.chat) | {"tokenizer": "tokenizer.json", "placeholder_id": 0},
    }
    about = {"format": FORMAT, "edgevlm": "0", "family": "llava", "source": "seeded", "files": files}
    (folder / MANIFEST).write_bytes(seal_manifest(about | sections))
    return folder


TOWER = pytest.mark.parametrize("chunk", [8, 2])
SEEDED = pytest.mark.parametrize(("budget", "chunk"), [(1176, 8), (196, 1)])


def test_the_demo_takes_what_was_planned():
    assert bundle_error("demo", 512, 2) < NEVER


def test_a_tower_takes_what_was_planned_from_its_checkpoint(exported):
    assert tower_error(exported("llava_onevision", side=24, vision_layers=3), 8) < NEVER


def test_a_seeded_decoder_takes_what_was_planned(seeded):
    assert bundle_error(seeded, 1176, 8) < NEVER


@pytest.mark.slow
@SEEDED
def test_on_a_quiet_machine_a_decoder_is_within_the_goal(seeded, budget, chunk):
    assert bundle_error(seeded, budget, chunk) < GOAL
