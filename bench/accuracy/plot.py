"""``--plot``: accuracy against budget, and the patches of one stream that each policy kept."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgevlm.bench.accuracy.report import BACKWARD, AccuracyReport, ReportRow
from edgevlm.bench.plots import new_figure, save_figure
from edgevlm.calib.accuracy.cases import SUITES, seed_words
from edgevlm.calib.accuracy.variants import FULL, ORACLE, VariantRun
from edgevlm.calib.demo.world import COLORS, GRID

FAINT = 0.93  # grey of what is not held


def plot(report: AccuracyReport, path: Path) -> None:
    """Write the chart and, for streams whose held tokens were recorded, the strips. Raises UserError."""
    shown = runs_shown(report)
    figure = new_figure(11, 5 + 0.3 * (len(shown) + 1))
    above, below = figure.subplots(2, 1, height_ratios=(5, 0.3 * (len(shown) + 1) or 1))
    draw_chart(report, above)
    draw_strips(report, shown, below)
    save_figure(figure, path)


def draw_chart(report: AccuracyReport, axes: Any) -> None:
    """Fractions of ``backward`` over the budget, on a logarithmic axis, with 95 % intervals; dashed: full KV and the oracle."""
    from matplotlib import colormaps

    rows = [row for row in report.rows if row.kind == BACKWARD]
    settings = report.comparison.settings
    axes.set_title(f"{settings.suite}, {settings.frames} frames, seed {settings.seed}: questions about before, fraction right")
    policies = list(dict.fromkeys(row.policy for row in rows))
    axes.set_prop_cycle(color=colormaps["tab20"](range(20)))
    for number, policy in enumerate(policies):
        own = sorted((row for row in rows if row.policy == policy), key=_percent)
        if policy == FULL:
            axes.axhline(own[0].accuracy.value, color="black", linestyle="--", label=policy)
            continue
        aside = 1 + 0.004 * (number - len(policies) / 2)  # so that bars stand side by side
        values = [row.accuracy.value for row in own]
        low = [row.accuracy.value - row.accuracy.low for row in own]
        high = [row.accuracy.high - row.accuracy.value for row in own]
        style = {"color": "grey", "linestyle": "--"} if policy == ORACLE else {}
        axes.errorbar([_percent(row) * aside for row in own], values, yerr=(low, high), marker=".", label=policy, **style)
    budgets = sorted({_percent(row) for row in rows if row.policy != FULL})
    axes.set_xscale("log")
    if budgets:
        axes.set_xlim(budgets[0] / 1.2, budgets[-1] * 1.2)
    axes.set_xticks(budgets, [f"{percent:g} %" for percent in budgets])
    axes.minorticks_off()
    axes.set_ylim(0, 1)
    axes.grid(axis="y", alpha=0.3)
    axes.set_xlabel("budget, fraction of the stream's vision tokens")
    if rows:
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")


def draw_strips(report: AccuracyReport, shown: list[VariantRun], axes: Any) -> None:
    """The first stream: its objects, then what each policy still held at the end, the darker the more layers and heads."""
    axes.set_axis_off()
    if not shown:
        return
    colours, owned = object_colours(report)
    strips = [np.where(owned[:, None], colours, FAINT)]
    for run in shown:
        held = np.array(report.comparison.records[run][0]["kept"])[:, None] / 100
        strips.append(FAINT + held * (np.where(owned[:, None], colours, 0.5) - FAINT))
    height = GRID + 2  # patches, and a gap
    image = np.ones((height * len(strips), (GRID + 1) * (len(owned) // GRID**2), 3))
    for line, strip in enumerate(strips):
        frames = strip.reshape(-1, GRID, GRID, 3)
        for number, frame in enumerate(frames):
            image[line * height : line * height + GRID, number * (GRID + 1) : number * (GRID + 1) + GRID] = frame
        label = shown[line - 1].label if line else "objects"
        axes.text(-2, line * height + GRID / 2, label, ha="right", va="center", fontsize="small", parse_math=False)
    axes.imshow(image, aspect="auto", interpolation="nearest")
    axes.set_title(f"the first stream at {shown[0].budget}, oldest frame left: what is held at the end", fontsize="medium")


def runs_shown(report: AccuracyReport) -> list[VariantRun]:
    """The runs of the budget nearest to an eighth, where policies differ and there is something to see."""
    runs = list(dict.fromkeys(row.run for row in report.rows if row.policy != FULL))
    if not runs:
        return []
    budget = min((run.budget for run in runs), key=lambda text: abs(math.log(float(text.rstrip("%")) / 12.5)))
    return [run for run in runs if run.budget == budget]


def object_colours(report: AccuracyReport) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Per token of the first stream the colour of its object, ``[tokens, 3]``, and whether it has one."""
    from matplotlib.colors import to_rgb

    settings = report.comparison.settings
    world, colours = SUITES[settings.suite]([*seed_words(settings.seed), 0]), []
    for _ in range(settings.frames):
        world.step()
        present = {thing.number: COLORS[thing.color] for thing in world.history.present}
        colours += [present[number] if number >= 0 else "" for number in world.owners.tolist()]
    shown = [to_rgb({"white": "black"}.get(colour, colour)) if colour else (0.0, 0.0, 0.0) for colour in colours]
    return np.array(shown), np.array([bool(colour) for colour in colours])


def _percent(row: ReportRow) -> float:
    return float(row.budget.rstrip("%"))
