"""``GET /metrics``: metrics in Prometheus's text format, named as in vLLM and Frigate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from edgevlm.apps.run.process import ResidentMemory
from edgevlm.apps.serve.service import Service
from edgevlm.runtime.answer import Found

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
GAUGE, COUNTER = GaugeMetricFamily, CounterMetricFamily
OF_STREAMS: dict[str, tuple[Any, str, Callable[[Any], float]]] = {
    "kv_cache_usage_ratio": (GAUGE, "Tokens held / budget.", lambda each: each.last.cache_tokens / max(1, each.session.budget)),
    "camera_fps": (GAUGE, "Frames watched per second.", lambda each: each.rates()[0]),
    "camera_skipped_fps": (GAUGE, "Frames skipped per second while the model is busy.", lambda each: each.rates()[1]),
    "camera_frames": (COUNTER, "Frames watched.", lambda each: each.last.frames),
    "camera_dropped_frames": (COUNTER, "Frames dropped.", lambda each: each.last.dropped),
    "camera_reconnects": (COUNTER, "Reconnections of the source.", lambda each: each.last.reconnects),
    "kv_cache_compressions": (COUNTER, "Compressions.", lambda each: each.last.compressions),
}


class Metrics(Collector):
    """A service's metrics, computed on request. ``answer_s`` is the mean time that an answer takes, in seconds."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        self.unfinished, self.answer_s = 0, 0.0
        of: dict[str, Any] = {"labelnames": ("stream",), "registry": self.registry}
        queued, first = (
            "Time from a question's arrival until the model starts processing it.",
            "Time from a question to its first token.",
        )
        self._queued = Histogram("edgevlm_request_queue_time_seconds", queued, buckets=BUCKETS, **of)
        self._ttft = Histogram("edgevlm_time_to_first_token_seconds", first, buckets=BUCKETS, **of)
        self._tokens = Counter("edgevlm_generation_tokens", "Tokens generated.", **of)
        self.refused = Counter(
            "edgevlm_requests_refused", "Questions refused because too many were waiting.", registry=self.registry
        )
        self._asked: set[str] = set()  # streams whose histograms have values
        self._service, self._resident = service, ResidentMemory()
        self.registry.register(self)

    def answered(self, stream: str, answer: Found) -> None:
        self._asked.add(stream)
        self._queued.labels(stream).observe(answer.queued_ms / 1e3)
        self._ttft.labels(stream).observe(answer.ttft_ms / 1e3)
        self._tokens.labels(stream).inc(len(answer.token_ids))

    def collect(self) -> Iterator[Metric]:
        service, streams = self._service, dict(self._service.streams)
        for name in self._asked - streams.keys():  # removed streams
            self._asked.discard(name)
            for histogram in (self._queued, self._ttft, self._tokens):
                histogram.remove(name)
        running = min(len({stream.model for stream in streams.values()}), self.unfinished)  # a model gives one answer at a time
        yield family("num_requests_running", "Answers being generated.", {(): running})
        yield family("num_requests_waiting", "Questions waiting.", {(): self.unfinished - running})
        yield family("process_resident_bytes", "Resident memory.", {(): self._resident.nbytes()})
        if (watts := service.power.watts()) is not None:
            yield family("power_watts", "Power measured by the machine's meter.", {(): watts})
        yield family("camera_up", "1 while frames arrive.", {name: each.state == "running" for name, each in streams.items()})
        for title, (kind, text, value) in OF_STREAMS.items():
            found = {name: value(each) for name, each in streams.items() if each.last is not None}
            yield family(title, text, found, kind=kind)
        if states := {(name, watch): each for name, one in streams.items() for watch, each in one.watcher.states().items()}:
            is_open = {of: each["state"] == "open" for of, each in states.items()}
            known = {of: each["probability"] for of, each in states.items() if each["probability"] is not None}
            yield family("watch_open", "1 while a watch is open.", is_open, "stream", "watch")
            yield family("watch_probability", "Probability that the answer of a watch is yes.", known, "stream", "watch")
        if service.has_events:
            delivery = service.delivery
            counted = delivery.recorded.copy()
            yield family("watch_events", "Openings and closings of watches.", counted, "stream", "watch", "state", kind=COUNTER)
            for title, text, counts, kind in (
                ("sink_waiting_events", "Events waiting to be sent.", delivery.store.waiting(), GAUGE),
                ("sink_sent_events", "Events sent.", delivery.delivered, COUNTER),
                ("sink_failures", "Failed attempts to send an event.", delivery.failures, COUNTER),
            ):
                yield family(title, text, {sink: counts.get(sink, 0) for sink in delivery.sinks}, "sink", kind=kind)


def family(title: str, text: str, found: Mapping[Any, float], *labels: str, kind: Any = GAUGE) -> Metric:
    """Make a metric from its values by label. ``labels``: the names of the labels, by default ``stream``."""
    metric: Metric = kind(f"edgevlm_{title}", text, labels=() if () in found else labels or ("stream",))
    for of, value in found.items():
        metric.add_metric((of,) if isinstance(of, str) else of, value)  # type: ignore[attr-defined]
    return metric
