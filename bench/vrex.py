"""Model V-Rex's accelerator analytically, and compare it with its paper's figures (``vrex.json``).

A call runs the vision tower, and then predicts which earlier rows it needs. The rest of the call takes as long as the slowest
of arithmetic, memory traffic and PCIe. A GPU must finish the prediction before it can fetch the rows. V-Rex hides the
prediction behind other work. Rows for the next layer are fetched while the current layer computes, so a fetch costs time only
if it takes longer.
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
    """A call's number of operations, and how many seconds each part takes. ``ideal``: the seconds for arithmetic and memory
    traffic at full rate.
    """

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
        """How many seconds longer the fetch takes than the decoder."""
        return max(0.0, self.fetch - self.decoder)


@dataclass(slots=True)
class Analytic:
    """The analytic model. The paper's Table I does not give the model's four constants.

    ``utilisation``: the fraction of the peak arithmetic and DRAM rates that is reached. ``scattered``: the fraction of PCIe's
    rate that is reached when scattered rows are fetched. ``top_k``, ``resv``: the bytes of DRAM traffic for each score when a
    GPU predicts rows with this method. The defaults are for ideal hardware.
    """

    paper: dict[str, Any]
    utilisation: float = 1.0
    scattered: float = 1.0
    top_k: float = 0.0
    resv: float = 0.0

    @property
    def frame_rows(self) -> int:
        return int(self.paper["tower"]["frame_rows"])

    @property
    def row_bytes(self) -> int:
        """The bytes of a row's keys and values in all layers."""
        llm = self.paper["llm"]
        return int(2 * llm["layers"] * llm["kv_heads"] * llm["head_dim"] * llm["bytes"])

    def parts(self, system: str) -> tuple[dict[str, Any], dict[str, Any]]:
        about = self.paper["systems"][system]
        return self.paper["hardware"][about["hardware"]], self.paper["methods"][about["method"]]

    def decoder_work(self, rows: int, seen: float, batch: int) -> tuple[float, float]:
        """Return the decoder's operations and DRAM bytes when each stream adds ``rows`` rows to ``seen`` earlier rows."""
        llm = self.paper["llm"]
        attention = llm["hidden"] * llm["head_dim"] * 2 * (llm["heads"] + llm["kv_heads"])
        matrices, head = llm["layers"] * (attention + 3 * llm["hidden"] * llm["intermediate"]), llm["vocab"] * llm["hidden"]
        scores = 4 * llm["layers"] * llm["heads"] * llm["head_dim"] * rows * (seen + rows / 2)
        operations = batch * (2 * matrices * rows + scores + 2 * head)
        return operations, llm["bytes"] * (matrices + head) + batch * self.row_bytes * (seen + rows)

    def tower_work(self, batch: int) -> tuple[float, float]:
        """Return the operations and DRAM bytes of the vision tower and its two-layer projector."""
        tower, hidden, width = self.paper["tower"], self.paper["llm"]["hidden"], self.paper["tower"]["width"]
        matrices, connector = tower["layers"] * (4 * width**2 + 2 * width * tower["intermediate"]), hidden * (width + hidden)
        attention = 4 * tower["layers"] * tower["patches"] ** 2 * width
        operations = batch * (2 * matrices * tower["patches"] + attention + 2 * connector * tower["frame_rows"])
        return operations, self.paper["llm"]["bytes"] * (matrices + connector)

    def call(self, system: str, rows: int, held: int, batch: int = 1) -> Call:
        """Return the modelled times of a call that adds ``rows`` rows to each of ``batch`` streams of ``held`` rows."""
        about, (hardware, method) = self.paper["systems"][system], self.parts(system)
        ratio = method["generation_ratio" if rows == 1 else "prefill_ratio"]
        decoder = self.decoder_work(rows, held * ratio, batch)
        vision = self.tower_work(batch) if rows == self.frame_rows else (0.0, 0.0)
        is_apart = method["is_scattered"] and ratio < 1 and (hardware["is_gpu"] or not about.get("has_kvmu", True))
        link, prediction = 1e9 * hardware["link_gb_s"] * (self.scattered if is_apart else 1.0), 0.0
        if hardware["is_gpu"] and (rows == 1 or method["predicts_frames"]):
            cost = self.resv if method["prediction"] == "resv" else self.top_k
            prediction = self.scores(system, rows, held, batch) * cost / (1e9 * hardware["dram_gb_s"])

        def seconds(work: tuple[float, float], utilisation: float) -> float:
            return max(work[0] / (1e12 * hardware["tflops"]), work[1] / (1e9 * hardware["dram_gb_s"])) / utilisation

        return Call(
            tower=seconds(vision, self.utilisation),
            prediction=prediction,
            decoder=seconds(decoder, self.utilisation),
            fetch=batch * self.row_bytes * held * ratio / link if about.get("offloads", True) else 0.0,
            operations=decoder[0] + vision[0],
            ideal=seconds(decoder, 1.0) + seconds(vision, 1.0),
        )

    def scores(self, system: str, rows: int, held: int, batch: int) -> float:
        """Return how many scores a method computes to predict the rows it needs."""
        summary = self.parts(system)[1]["rows_a_summary"]
        return 0.0 if summary is None else batch * rows * held / summary

    def seconds(self, kind: str, system: str, held: int, batch: int = 1) -> float:
        """Return how many seconds a ``frame``, ``token`` or ``answer`` (with COIN's frames and question) takes."""
        if kind != "answer":
            return self.call(system, self.frame_rows if kind == "frame" else 1, held, batch).seconds
        load = self.paper["workload"]
        counts = ((load["frames"], self.frame_rows), (1, load["question"]), (load["answer"], 1))
        return float(sum(count * self.call(system, rows, held).seconds for count, rows in counts))

    def quantity(self, name: str, system: str, over: str | None, held: int, batch: int) -> float:
        """Return the modelled value of one of the paper's figures. Speedups and gains are relative to the system ``over``."""
        frame, watts = self.call(system, self.frame_rows, held, batch), self.parts(system)[0]["watts"]
        kind, _, what = name.partition("_")
        if what in ("ms", "speedup", "energy_gain"):
            mine, other = (self.seconds(kind, one, held, batch) for one in (system, over or system))
            gain = self.parts(over or system)[0]["watts"] / watts if what == "energy_gain" else 1.0
            return 1e3 * mine if what == "ms" else other / mine * gain
        if name == "frame_tops_a_watt":
            return frame.operations / (1e12 * frame.seconds * watts)
        if name == "prefill_fraction":
            answer = self.paper["workload"]["answer"] * self.seconds("token", system, held)
            return 1 - answer / self.seconds("answer", system, held)
        parts = {"prediction": frame.prediction, "fetch": frame.waiting, "retrieval": frame.prediction + frame.waiting}
        return (parts | {"roofline": frame.ideal})[kind] / frame.seconds


def calibrated(paper: dict[str, Any]) -> Analytic:
    """Return the model with its four constants fitted, each to one figure of the paper."""
    fixing = {figure["fixes"]: figure for figure in paper["figures"] if "fixes" in figure}
    model, figure = Analytic(paper), fixing["utilisation"]
    least = min(paper["lengths"]["value"])
    model.utilisation = model.seconds("token", figure["system"], least) / (figure["value"] / 1e3)
    figure = fixing["scattered fetch"]
    frame = model.call(figure["system"], model.frame_rows, figure["length"])
    model.scattered = frame.fetch / (figure["value"] * frame.seconds - frame.tower)
    for name, fixes in (("top_k", "top-k prediction"), ("resv", "ReSV prediction")):
        system, held, value = (fixing[fixes][field] for field in ("system", "length", "value"))
        seconds = model.seconds("frame", system, held) * value / (1 - value)
        scores = model.scores(system, model.frame_rows, held, 1)
        setattr(model, name, seconds * 1e9 * model.parts(system)[0]["dram_gb_s"] / scores)
    return model


def vrex() -> Iterator[dict[str, Any]]:
    """Yield a line for each figure in the paper, then the model's constants. Nothing is run on an accelerator."""
    model = calibrated(load_paper())
    errors, lengths = [], model.paper["lengths"]["value"]
    for figure in model.paper["figures"]:
        line = {"bench": "vrex"} | {name: figure.get(name) for name in ("at", "quantity", "system", "over", "length", "pick")}
        batch, held = figure.get("batch", 1), [figure["length"]] if "length" in figure else lengths
        found = [model.quantity(figure["quantity"], figure["system"], figure.get("over"), length, batch) for length in held]
        predicted = min(found) if figure.get("pick") == "least" else max(found)
        error = predicted / figure["value"] - 1
        if "fixes" not in figure:
            errors.append(abs(error))
        numbers = {"predicted": round(predicted, 4), "paper": figure["value"], "error": round(error, 4)}
        yield {**line, "batch": batch, **numbers, "fixes": figure.get("fixes")}
    constants = {name: float(f"{getattr(model, name):.4g}") for name in ("utilisation", "scattered", "top_k", "resv")}
    yield {"bench": "vrex-constants", "median_error": round(median(errors), 4), **constants}


def load_paper() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files(__package__).joinpath("vrex.json").read_text(encoding="utf-8"))
    return found
