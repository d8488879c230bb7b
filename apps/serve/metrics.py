"""``GET /metrics``: Prometheus's text, under vLLM's and Frigate's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psutil
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from edgevlm.apps.serve.service import Service
from edgevlm.apps.watches.delivery import Delivery
from edgevlm.runtime.answer import Answer

TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


OF_STREAMS: tuple[tuple[Any, str, str, Callable[[Any], float]], ...] = (
    (GaugeMetricFamily, "edgevlm_camera_up", "1 while frames come.", lambda stream: float(stream.state == "running")),
    (
        GaugeMetricFamily,
        "edgevlm_kv_cache_usage_ratio",
        "Tokens held over the budget.",
        lambda stream: stream.stats.cache_tokens / max(1, stream.session.budget),
    ),
    (GaugeMetricFamily, "edgevlm_camera_fps", "Frames watched per second.", lambda stream: stream.rates()[0]),
    (
        GaugeMetricFamily,
        "edgevlm_camera_skipped_fps",
        "Frames skipped per second while the model is busy.",
        lambda stream: stream.rates()[1],
    ),
    (CounterMetricFamily, "edgevlm_camera_frames", "Frames watched.", lambda stream: stream.stats.frames),
    (CounterMetricFamily, "edgevlm_camera_dropped_frames", "Frames dropped.", lambda stream: stream.stats.dropped),
    (CounterMetricFamily, "edgevlm_camera_reconnects", "Connections that came back.", lambda stream: stream.stats.reconnects),
    (CounterMetricFamily, "edgevlm_kv_cache_compressions", "Compressions.", lambda stream: stream.stats.compressions),
)


class Metrics(Collector):
    """What a service is doing, read when it is asked for. unfinished: questions that run or wait. answer_s: an answer takes."""

    def __init__(self, service: Service) -> None:
        self.registry = CollectorRegistry()
        self.unfinished, self.answer_s = 0, 0.0
        labels = ("stream",)
        self._queued = Histogram(
            "edgevlm_request_queue_time_seconds", "From a question until the model begins with it.", labels,
            buckets=TTFT_BUCKETS, registry=self.registry,
        )  # fmt: skip
        self._ttft = Histogram(
            "edgevlm_time_to_first_token_seconds", "From a question to its first token.", labels,
            buckets=TTFT_BUCKETS, registry=self.registry,
        )  # fmt: skip
        self._tokens = Counter("edgevlm_generation_tokens", "Tokens generated.", labels, registry=self.registry)
        self.refused = Counter("edgevlm_requests_refused", "Questions that were refused.", ("reason",), registry=self.registry)
        for reason in ("queue_full", "waited_too_long"):
            self.refused.labels(reason)
        self._asked: set[str] = set()  # streams that have figures of answers
        self._service, self._process = service, psutil.Process()
        self.registry.register(self)

    def answered(self, stream: str, answer: Answer) -> None:
        """Count an answer that has a token."""
        self._asked.add(stream)
        self._queued.labels(stream).observe(answer.queued_ms / 1e3)
        self._ttft.labels(stream).observe(answer.ttft_ms / 1e3)
        self._tokens.labels(stream).inc(len(answer.token_ids))

    def collect(self) -> Iterator[Metric]:
        for name in self._asked - self._service.streams.keys():  # those that were removed
            self._asked.discard(name)
            for family in (self._queued, self._ttft, self._tokens):
                family.remove(name)
        models = {stream.model for stream in self._service.streams.values()}  # each answers one question at a time
        running = min(len(models), self.unfinished)
        yield GaugeMetricFamily("edgevlm_num_requests_running", "Answers being generated.", value=running)
        yield GaugeMetricFamily("edgevlm_num_requests_waiting", "Questions that wait.", value=self.unfinished - running)
        yield GaugeMetricFamily("edgevlm_process_resident_bytes", "Resident memory.", value=self._process.memory_info().rss)
        if (watts := self._service.power.watts()) is not None:
            yield GaugeMetricFamily("edgevlm_power_watts", "What the machine's meter measures.", value=watts)
        for kind, title, text, value in OF_STREAMS:
            metric = kind(title, text, labels=("stream",))
            for name, stream in self._service.streams.items():
                if stream.stats is not None or title == "edgevlm_camera_up":
                    metric.add_metric([name], value(stream))
            yield metric
        yield from self._of_watches()
        if self._service.has_events:
            yield from self._of_events(self._service.delivery)

    def _of_watches(self) -> Iterator[Metric]:
        labels = ("stream", "watch")
        is_open = GaugeMetricFamily("edgevlm_watch_open", "1 while a watch is open.", labels=labels)
        probability = GaugeMetricFamily("edgevlm_watch_probability", "That the answer of a watch is yes.", labels=labels)
        for name, stream in self._service.streams.items() if self._service.watches.watches else ():
            for watch, each in stream.watcher.states().items():
                is_open.add_metric((name, watch), float(each["state"] == "open"))
                if each["probability"] is not None:
                    probability.add_metric((name, watch), each["probability"])
        if is_open.samples:
            yield from (is_open, probability)

    def _of_events(self, delivery: Delivery) -> Iterator[Metric]:
        labels = ("stream", "watch", "state")
        events = CounterMetricFamily("edgevlm_watch_events", "Watches that opened and closed.", labels=labels)
        for about, count in delivery.recorded.copy().items():
            events.add_metric(about, count)
        yield events
        waiting = GaugeMetricFamily("edgevlm_sink_waiting_events", "Events still to be sent.", labels=("sink",))
        sent = CounterMetricFamily("edgevlm_sink_sent_events", "Events that were sent.", labels=("sink",))
        failures = CounterMetricFamily("edgevlm_sink_failures", "Attempts that failed.", labels=("sink",))
        depths = delivery.store.waiting()
        for sink in delivery.sinks:
            waiting.add_metric([sink], depths.get(sink, 0))
            sent.add_metric([sink], delivery.delivered[sink])
            failures.add_metric([sink], delivery.failures[sink])
        yield from (waiting, sent, failures)
