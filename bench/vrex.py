"""V-Rex's accelerator as a small analytic model, beside the figures of its paper (``vrex.json``).

A call takes the longer of its arithmetic and its memory traffic, and of that and its fetch over PCIe:

    call = tower + prediction + max(max(operations / F, bytes / B), fetched bytes / G)

Prediction comes before the fetch of what it chooses on a GPU; V-Rex's DRE hides it. Every method fetches a layer's rows while
the layer before it computes (sec. VI-B), so that a fetch costs what is left of it then.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """Seconds of a call's parts, and its operations. ``ideal``: its arithmetic and traffic alone, without losses."""

    tower: float
    prediction: float
    decoder: float
    fetch: float
    operations: float
    ideal: float

    @property
    def seconds(self) -> float:
        return self.tower + self.prediction + max(self.decoder, self.fetch)

    @property
    def waiting(self) -> float:
        """What is left of the fetch when the decoder is done."""
        return max(0.0, self.fetch - self.decoder)


@dataclass(slots=True)
class Analytic:
    """The model.

    Four constants say what Table I does not: ``utilisation`` of the rates of arithmetic and DRAM, ``scattered`` of PCIe's rate
    by rows that lie apart, and bytes of DRAM that a GPU's prediction costs per score, ``top_k`` and ``resv``. 1 and 0 are a
    machine without losses.
    """

    paper: dict[str, Any]
    utilisation: float = 1.0
    scattered: float = 1.0
    top_k: float = 0.0
    resv: float = 0.0

    def frame(self, system: str, held: int, batch: int = 1) -> Call:
        """One frame of each of ``batch`` streams that hold ``held`` rows each."""
        return self._call(system, self.paper["tower"]["frame_rows"], held, batch, is_frame=True)

    def question(self, system: str, held: int) -> Call:
        """The prefill of a question."""
        return self._call(system, self.paper["workload"]["question"], held, 1)

    def token(self, system: str, held: int, batch: int = 1) -> Call:
        """One token of an answer."""
        return self._call(system, 1, held, batch, is_token=True)

    def parts(self, system: str) -> tuple[dict[str, Any], dict[str, Any], tuple[float, float]]:
        """Hardware, method and (prefill, generation) ratios of a system."""
        about = self.paper["systems"][system]
        method = self.paper["methods"][about["method"]]
        return self.paper["hardware"][about["hardware"]], method, (method["prefill_ratio"], method["generation_ratio"])

    def row_bytes(self) -> int:
        """Keys and values of one row in all layers."""
        llm = self.paper["llm"]
        return int(2 * llm["layers"] * llm["kv_heads"] * llm["head_dim"] * llm["bytes"])

    def decoder_work(self, rows: int, seen: float, batch: int) -> tuple[float, float]:
        """Operations and bytes of DRAM of ``rows`` new rows of each stream that see ``seen`` earlier ones."""
        llm = self.paper["llm"]
        attention = llm["hidden"] * llm["head_dim"] * 2 * (llm["heads"] + llm["kv_heads"])
        matrices, head = llm["layers"] * (attention + 3 * llm["hidden"] * llm["intermediate"]), llm["vocab"] * llm["hidden"]
        scores = 4 * llm["layers"] * llm["heads"] * llm["head_dim"] * rows * (seen + rows / 2)
        operations = batch * (2 * matrices * rows + scores + 2 * head)
        return operations, llm["bytes"] * (matrices + head) + batch * self.row_bytes() * (seen + rows)

    def tower_work(self, batch: int) -> tuple[float, float]:
        """Operations and bytes of the vision tower and of the two layers that bring a frame's rows to the decoder's width."""
        tower, hidden, width = self.paper["tower"], self.paper["llm"]["hidden"], self.paper["tower"]["width"]
        matrices, connector = tower["layers"] * (4 * width**2 + 2 * width * tower["intermediate"]), hidden * (width + hidden)
        attention = 4 * tower["layers"] * tower["patches"] ** 2 * width
        operations = batch * (2 * matrices * tower["patches"] + attention + 2 * connector * tower["frame_rows"])
        return operations, self.paper["llm"]["bytes"] * (matrices + connector)

    def _call(self, system: str, rows: int, held: int, batch: int, is_frame: bool = False, is_token: bool = False) -> Call:
        about, (hardware, method, ratios) = self.paper["systems"][system], self.parts(system)
        ratio = ratios[is_token]
        decoder, vision = self.decoder_work(rows, held * ratio, batch), self.tower_work(batch) if is_frame else (0.0, 0.0)
        has_kvmu = not hardware["is_gpu"] and about.get("has_kvmu", True)
        is_apart = method["is_scattered"] and ratio < 1 and not has_kvmu
        link = 1e9 * hardware["link_gb_s"] * (self.scattered if is_apart else 1.0)
        prediction = 0.0
        if hardware["is_gpu"] and (is_token or method["predicts_frames"]):
            cost = self.resv if method["prediction"] == "resv" else self.top_k
            prediction = self.scores(system, rows, held, batch) * cost / (1e9 * hardware["dram_gb_s"])

        def seconds(work: tuple[float, float], utilisation: float) -> float:
            return max(work[0] / (1e12 * hardware["tflops"]), work[1] / (1e9 * hardware["dram_gb_s"])) / utilisation

        return Call(
            tower=seconds(vision, self.utilisation),
            prediction=prediction,
            decoder=seconds(decoder, self.utilisation),
            fetch=batch * self.row_bytes() * held * ratio / link if about.get("offloads", True) else 0.0,
            operations=decoder[0] + vision[0],
            ideal=seconds(decoder, 1.0) + seconds(vision, 1.0),
        )

    def scores(self, system: str, rows: int, held: int, batch: int) -> float:
        """Scores of query rows and summaries, each of all heads and layers; 0 for a method that scores nothing."""
        summary = self.parts(system)[1]["rows_a_summary"]
        return 0.0 if summary is None else batch * rows * held / summary

    def quantity(self, name: str, system: str, over: str | None, held: int, batch: int) -> float:
        """What a figure shows; speedups and gains are how many times more ``over`` takes."""
        frame, watts = self.frame(system, held, batch), self.parts(system)[0]["watts"]
        kind, _, what = name.partition("_")
        if what in ("ms", "speedup", "energy_gain"):
            mine, other = (self._seconds(kind, one, held, batch) for one in (system, over or system))
            gain = self.parts(over or system)[0]["watts"] / watts if what == "energy_gain" else 1.0
            return 1e3 * mine if what == "ms" else other / mine * gain
        if name == "frame_tops_a_watt":
            return frame.operations / (1e12 * frame.seconds * watts)
        if name == "prefill_fraction":
            load = self.paper["workload"]
            answer = load["answer"] * self.token(system, held).seconds
            return 1 - answer / self._seconds("answer", system, held, batch)
        parts = {"prediction": frame.prediction, "fetch": frame.waiting, "retrieval": frame.prediction + frame.waiting}
        return (parts | {"roofline": frame.ideal})[kind] / frame.seconds

    def _seconds(self, kind: str, system: str, held: int, batch: int) -> float:
        """Of a ``frame``, a ``token``, or an ``answer``: COIN's frames, question and answer."""
        if kind != "answer":
            return (self.frame if kind == "frame" else self.token)(system, held, batch).seconds
        load = self.paper["workload"]
        prefill = load["frames"] * self.frame(system, held).seconds + self.question(system, held).seconds
        return float(prefill + load["answer"] * self.token(system, held).seconds)


def load_paper() -> dict[str, Any]:
    """What the paper says: its hardware, methods, systems and figures."""
    found: dict[str, Any] = json.loads(files(__package__).joinpath("vrex.json").read_text(encoding="utf-8"))
    return found


def calibrated(paper: dict[str, Any]) -> Analytic:
    """The model with its four constants, each taken from one figure under the paper's own ratios."""
    fixing = {figure["fixes"]: figure for figure in paper["figures"] if "fixes" in figure}
    model, figure = Analytic(paper), fixing["utilisation"]
    model.utilisation = model.token(figure["system"], min(paper["lengths"]["value"])).seconds / (figure["value"] / 1e3)
    figure = fixing["scattered fetch"]
    frame = model.frame(figure["system"], figure["length"])
    model.scattered = frame.fetch / (figure["value"] * frame.seconds - frame.tower)
    for name in ("top_k", "resv"):
        figure = fixing["top-k prediction" if name == "top_k" else "ReSV prediction"]
        system, held = figure["system"], figure["length"]
        seconds = model.frame(system, held).seconds * figure["value"] / (1 - figure["value"])
        scores = model.scores(system, paper["tower"]["frame_rows"], held, 1)
        setattr(model, name, seconds * 1e9 * model.parts(system)[0]["dram_gb_s"] / scores)
    return model


def vrex() -> Iterator[dict[str, Any]]:
    """A line for each figure of the paper, then the model's constants. Nothing is run.

    ``link_bound``: the fraction of rows that PCIe can bring in a frame's milliseconds.
    """
    model = calibrated(load_paper())
    errors, lengths = [], model.paper["lengths"]["value"]
    for figure in model.paper["figures"]:
        line = {"bench": "vrex"} | {name: figure.get(name) for name in ("at", "quantity", "system", "over", "length", "pick")}
        batch, held = figure.get("batch", 1), [figure["length"]] if "length" in figure else lengths
        found = [model.quantity(figure["quantity"], figure["system"], figure.get("over"), length, batch) for length in held]
        predicted = min(found) if figure.get("pick") == "least" else max(found)
        error, bound = predicted / figure["value"] - 1, None
        if figure["quantity"] == "frame_ms" and "length" in figure:
            rate = 1e9 * model.parts(figure["system"])[0]["link_gb_s"]
            bound = round(figure["value"] / 1e3 * rate / (batch * figure["length"] * model.row_bytes()), 4)
        if "fixes" not in figure:
            errors.append(abs(error))
        numbers = {"predicted": round(predicted, 4), "paper": figure["value"], "error": round(error, 4)}
        yield {**line, "batch": batch, **numbers, "fixes": figure.get("fixes"), "link_bound": bound}
    constants = {name: float(f"{getattr(model, name):.4g}") for name in ("utilisation", "scattered", "top_k", "resv")}
    yield {"bench": "vrex-constants", "median_error": round(median(errors), 4), **constants}
