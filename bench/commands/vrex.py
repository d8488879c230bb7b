"""``edgevlm bench vrex``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from edgevlm.apps.commands.cli_options import Json

if TYPE_CHECKING:
    from edgevlm.bench.vrex.analytic import Analytic
    from edgevlm.bench.vrex.predict import Prediction


def vrex(
    prefill_ratio: Annotated[
        float | None,
        typer.Option(help="ReSV's share of the rows held that a frame fetches.", show_default="0.327", min=0, max=1),
    ] = None,
    generation_ratio: Annotated[
        float | None, typer.Option(help="And a token of an answer.", show_default="0.025", min=0, max=1)
    ] = None,
    ratios: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Lines of bench retrieval: measured ratios of rekv, resv and others.")
    ] = None,
    as_json: Json = False,
) -> None:
    """V-Rex's accelerator as an analytic model, beside the figures of its paper.

    Nothing is run: milliseconds, speedups and energy follow from Table I, the sizes of Llama-3 8B and the ratios. A figure that
    fixes one of the model's four constants is marked with it.
    """
    from edgevlm.bench.vrex.analytic import Analytic
    from edgevlm.bench.vrex.calibrated import calibrate
    from edgevlm.bench.vrex.paper import load_paper
    from edgevlm.bench.vrex.predict import latencies, predictions
    from edgevlm.bench.vrex.ratios import read_ratios

    paper = load_paper()
    resv = paper.systems["V-Rex8"].method
    chosen = {"ReSV": (resv.prefill_ratio, resv.generation_ratio)} | (read_ratios(ratios) if ratios else {})
    prefill, generation = chosen["ReSV"]
    chosen["ReSV"] = (
        prefill if prefill_ratio is None else prefill_ratio,
        generation if generation_ratio is None else generation_ratio,
    )
    model = Analytic(paper.with_ratios(chosen), calibrate(paper))
    found = list(predictions(model))
    if as_json:
        for line in (*(one.line() for one in found), *latencies(model)):
            typer.echo(json.dumps(line))
        return
    show(model, found)


def show(model: Analytic, found: list[Prediction]) -> None:
    """The tables for a person."""
    from edgevlm.bench.vrex.predict import latencies, middle_error

    typer.echo(
        f"{'figure':<10}{'quantity':<18}{'system':<34}{'rows held':>10}{'batch':>6}{'predicted':>11}{'paper':>8}{'error':>8}"
    )
    for one in found:
        figure = one.figure
        system = figure.system + (f" / {figure.over}" if figure.over else "")
        held = f"{figure.length:,}" if figure.length else str(figure.pick)
        error = f"  fixes {figure.fixes}" if figure.fixes else f"{100 * one.error:>+6.0f} %"
        numbers = f"{figure.batch:>6}{one.predicted:>11.3g}{figure.value:>8g}"
        typer.echo(f"{figure.at:<10}{figure.quantity:<18}{system:<34}{held:>10}{numbers}{error}")
    typer.echo(f"median error of what fixes nothing: {100 * middle_error(found):.0f} %")
    fixed = model.constants
    typer.echo(
        f"constants: utilisation {fixed.utilisation:.3f}, scattered fetch {fixed.scattered:.3f}, a GPU's prediction "
        f"{fixed.top_k / 1e3:.0f} KB a score of top-k and {fixed.resv / 1e6:.2f} MB of ReSV"
    )
    typer.echo("")
    lines, lengths = list(latencies(model)), model.paper.lengths
    for name, unit in (("frame_ms", "ms a frame"), ("token_ms", "ms a token"), ("frame_j", "J a frame")):
        typer.echo(f"{unit:<16}" + "".join(f"{length:>10,}" for length in lengths))
        for system in dict.fromkeys(line["system"] for line in lines):
            typer.echo(f"{system:<16}" + "".join(f"{line[name]:>10.4g}" for line in lines if line["system"] == system))
        typer.echo("")
    for one in found:
        used = model.paper.systems[one.figure.system].method.prefill_ratio
        if one.room is not None and one.room < used:
            most = f"{100 * one.room:.1f} % of {one.figure.length:,} rows at the most"
            typer.echo(f"{one.figure.at}: in {one.figure.value:g} ms PCIe brings {most}; the ratio is {100 * used:.1f} %")
