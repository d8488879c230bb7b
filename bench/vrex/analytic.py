"""The equations: a call takes the longer of its arithmetic and its memory traffic, and of both and its fetch over PCIe.

    call = tower + prediction + max(max(operations / F, bytes / B), fetched bytes / G)

Prediction comes before the fetch of what it chooses, beside nothing on a GPU; V-Rex's DRE hides it. All methods fetch a layer's
rows while the layer before it computes (sec. VI-B), so that a fetch costs what is left of it then.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgevlm.bench.vrex.paper import Hardware, Paper, System


@dataclass(frozen=True, slots=True)
class Constants:
    """What Table I does not tell; 1 and 0 are a machine without losses.

    utilisation: of the rates of arithmetic and DRAM, of every hardware. scattered: of PCIe's rate, by rows that lie apart.
    top_k, resv: prediction on a GPU, per query row and summary, as the bytes that its DRAM would move meanwhile.
    """

    utilisation: float = 1.0
    scattered: float = 1.0
    top_k: float = 0.0
    resv: float = 0.0


@dataclass(frozen=True, slots=True)
class Work:
    """Operations (a multiplication and an addition are two) and bytes of DRAM."""

    operations: float
    bytes: float

    def seconds(self, hardware: Hardware, utilisation: float = 1.0) -> float:
        """The longer of the two."""
        return max(self.operations / (1e12 * hardware.tflops), self.bytes / (1e9 * hardware.dram_gb_s)) / utilisation


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


@dataclass(frozen=True, slots=True)
class Analytic:
    """The model of a paper's sizes under constants."""

    paper: Paper
    constants: Constants

    def frame(self, system: System, held: int, batch: int = 1) -> Call:
        """One frame of each of ``batch`` streams that hold ``held`` rows each."""
        method, rows = system.method, self.paper.tower.frame_rows
        return self._call(system, rows, held, method.prefill_ratio, batch, method.predicts_frames, self.tower_work(batch))

    def question(self, system: System, held: int) -> Call:
        """A question's prefill."""
        method, rows = system.method, self.paper.workload.question
        return self._call(system, rows, held, method.prefill_ratio, 1, method.predicts_frames)

    def token(self, system: System, held: int, batch: int = 1) -> Call:
        """One token of an answer."""
        return self._call(system, 1, held, system.method.generation_ratio, batch, True)

    def decoder_work(self, rows: int, seen: float, batch: int) -> Work:
        """``rows`` new rows of each stream that see ``seen`` earlier ones.

        Operations: 2 P rows + 4 L H D rows (seen + rows / 2) + 2 V E. Bytes: the weights of layers and head once, and for each
        stream the rows seen and the new ones.
        """
        llm = self.paper.llm
        attention = 4 * llm.layers * llm.heads * llm.head_dim * rows * (seen + rows / 2)
        operations = batch * (2 * llm.matrices * rows + attention + 2 * llm.head)
        return Work(operations, llm.bytes * (llm.matrices + llm.head) + batch * llm.row_bytes * (seen + rows))

    def tower_work(self, batch: int) -> Work:
        """2 P N + 4 L N^2 W for N patches, and the two layers that bring a frame's rows to the decoder's width."""
        tower, hidden = self.paper.tower, self.paper.llm.hidden
        connector = hidden * (tower.width + hidden)
        attention = 4 * tower.layers * tower.patches**2 * tower.width
        operations = batch * (2 * tower.matrices * tower.patches + attention + 2 * connector * tower.frame_rows)
        return Work(operations, self.paper.llm.bytes * (tower.matrices + connector))

    def prediction_scores(self, system: System, rows: int, held: int, batch: int) -> float:
        """Scores of query rows and summaries, each of all heads and layers; 0 for a method that scores nothing."""
        summary = system.method.rows_a_summary
        return 0.0 if summary is None else batch * rows * held / summary

    def _call(
        self, system: System, rows: int, held: int, ratio: float, batch: int, predicts: bool, tower: Work | None = None
    ) -> Call:
        hardware, constants, seen = system.hardware, self.constants, held * ratio
        decoder, vision = self.decoder_work(rows, seen, batch), tower or Work(0, 0)
        is_apart = system.method.is_scattered and ratio < 1 and (hardware.is_gpu or not system.has_kvmu)
        link = 1e9 * hardware.link_gb_s * (constants.scattered if is_apart else 1.0)
        prediction = 0.0
        if predicts and hardware.is_gpu:
            cost = constants.resv if system.method.prediction == "resv" else constants.top_k
            prediction = self.prediction_scores(system, rows, held, batch) * cost / (1e9 * hardware.dram_gb_s)
        return Call(
            tower=vision.seconds(hardware, constants.utilisation),
            prediction=prediction,
            decoder=decoder.seconds(hardware, constants.utilisation),
            fetch=batch * self.paper.llm.row_bytes * seen / link if system.offloads else 0.0,
            operations=decoder.operations + vision.operations,
            ideal=decoder.seconds(hardware) + vision.seconds(hardware),
        )
