"""The four constants, each taken from one figure of the paper under the paper's own ratios; nothing else is fitted."""

from __future__ import annotations

from dataclasses import replace

from edgevlm.bench.vrex.analytic import Analytic, Constants
from edgevlm.bench.vrex.paper import Paper


def calibrate(paper: Paper) -> Constants:
    """``paper``: with its own ratios."""
    constants = Constants(utilisation=utilisation(paper))
    constants = replace(constants, scattered=scattered(Analytic(paper, constants)))
    top_k = prediction(Analytic(paper, constants), "top-k prediction")
    return replace(constants, top_k=top_k, resv=prediction(Analytic(paper, constants), "ReSV prediction"))


def utilisation(paper: Paper) -> float:
    """A token's time without losses over the paper's, at the shortest length."""
    figure = paper.fixing("utilisation")
    ideal = Analytic(paper, Constants()).token(paper.systems[figure.system], min(paper.lengths)).seconds
    return ideal / (figure.value / 1e3)


def scattered(model: Analytic) -> float:
    """So much of PCIe's rate that a frame takes as many times longer without the KVMU as Fig. 16 has it."""
    figure = model.paper.fixing("scattered fetch")
    assert figure.length is not None
    whole = model.frame(model.paper.systems[figure.system], figure.length)
    return whole.fetch / (figure.value * whole.seconds - whole.tower)


def prediction(model: Analytic, constant: str) -> float:
    """So long a prediction that its share of a frame is the figure's; as bytes of DRAM per score."""
    figure = model.paper.fixing(constant)
    assert figure.length is not None
    system = model.paper.systems[figure.system]
    seconds = model.frame(system, figure.length).seconds * figure.value / (1 - figure.value)
    scores = model.prediction_scores(system, model.paper.tower.frame_rows, figure.length, 1)
    return seconds * 1e9 * system.hardware.dram_gb_s / scores
