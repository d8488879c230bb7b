"""Models and devices that tests of the plan share."""

from dataclasses import replace

from edgevlm.apps.planning.formulas import Roofline
from edgevlm.apps.planning.model import planned, published_facts
from edgevlm.apps.planning.plan import PlanRequest, choose
from edgevlm.engines.devices import load_device


def qwen3(name, tokens=265):
    """A Qwen3-VL model as published, its grid of ``tokens`` tokens."""
    config = next(fact["config"] for fact in published_facts() if fact["id"] == f"Qwen/{name}-Instruct")
    model = planned(name, config, lambda factor, budget, clip: (480, 640))
    grid = {"tokens": tokens, "projected": tokens, "patches": 4 * tokens, "attended": 4.0 * tokens}
    return replace(model, tower=replace(model.tower, **grid))


MODEL, SMALL = qwen3("Qwen3-VL-4B"), qwen3("Qwen3-VL-2B")


def roofline(device="orin-nx-16", precision="int4", kv="fp16", model=SMALL):
    return Roofline(model, load_device(device), precision, kv)


def with_figures(device, **values):
    figures = {name: replace(device.figures[name], value=value) for name, value in values.items()}
    return replace(device, figures={**device.figures, **figures})


def make_line(model=SMALL, device="cpu", **asked):
    return choose(model, load_device(device), PlanRequest("a model", device, **asked)).line()
