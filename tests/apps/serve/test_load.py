"""What a service says and measures of many cameras on one model, with clocks of the test's own."""

import asyncio
import socket
import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from edgevlm.apps.serve.config import ServeConfig
from edgevlm.apps.serve.metrics import Metrics
from edgevlm.apps.serve.run import bound
from edgevlm.apps.serve.service import Service
from edgevlm.apps.serve.stream import RATES_S, FrameRates
from edgevlm.runtime.answer import Answer


def test_rates_are_of_the_last_seconds_and_begin_anew_with_a_source():
    rates = FrameRates()
    assert rates() == (0.0, 0.0)
    for second in range(60):
        rates.count(second, 2 * second if second < 30 else 60 + (second - 30), 0 if second < 30 else second - 30)
    assert rates() == (1.0, 1.0)
    rates.count(60, 91, 0)  # opened again: nothing has been skipped
    assert rates() == (0.0, 0.0)
    rates.count(60 + RATES_S, 91, 0)
    assert rates() == (0.0, 0.0)


def test_overload_is_said_once_and_so_is_its_end(tmp_path):
    said, heard = [], []
    service, model, other = Service(ServeConfig(state=str(tmp_path)), said.append), object(), object()
    service._models = {"demo": model, "calm": other}
    events = SimpleNamespace(send=lambda kind, fields: heard.append(fields["text"]))
    service.streams = {
        name: SimpleNamespace(model=of, rates=FrameRates(), events=events)
        for name, of in (("a", model), ("b", model), ("c", other))
    }

    def go_on(seconds, watched, skipped):
        for stream in service.streams.values():
            of = (2.0, 0.0) if stream.model is other else (watched, skipped)
            before = stream.rates._counts[-1] if stream.rates._counts else (0.0, 0, 0)
            for _ in range(seconds):
                before = (before[0] + 1, before[1] + of[0], before[2] + of[1])
                stream.rates.count(*before)
        service.report_load()

    go_on(20, 2, 0)
    assert said == []
    go_on(20, 1, 1)
    go_on(20, 1, 1)
    assert len(said) == 1
    assert said[0].startswith("demo: overloaded: 2 cameras give 4.0 frames a second and 2.0 are watched")
    go_on(20, 2, 0)
    go_on(20, 2, 0)
    assert said[1:] == ["demo: no longer overloaded: all frames of 2 cameras are watched"]
    assert heard == [line.removeprefix("demo: ") for line in said for _ in "ab"]


def test_the_end_comes_within_a_bound_that_is_told_of(tmp_path, monkeypatch):
    monkeypatch.setattr("edgevlm.apps.serve.service.CLOSING_S", 0.1)
    said, closed, go = [], [], threading.Event()
    service, stats = Service(ServeConfig(state=str(tmp_path)), said.append), SimpleNamespace(state_bytes=100_000_000)

    def stream(close):
        return SimpleNamespace(session=SimpleNamespace(stats=stats), close=close)

    service.streams = {"hangs": stream(lambda: go.wait(20)), "fine": stream(lambda: closed.append(1))}
    service.close()
    assert (closed, go.is_set()) == ([1], False)
    assert said == [
        "writing the last snapshots, 200 MB, for 0.1 s at most",
        "hangs: not closed within 0.1 s; the snapshot before the last one stays",
    ]
    go.set()


def test_metrics_forget_streams_that_were_removed(tmp_path):
    service = Service(ServeConfig(state=str(tmp_path)), print)
    metrics = Metrics(service)

    def streams():
        families = list(text_string_to_metric_families(generate_latest(metrics.registry).decode()))
        return {sample.labels.get("stream") for family in families for sample in family.samples} - {None}

    for number in range(100):  # cameras that come, are asked and go
        service.streams = {f"camera-{number}": SimpleNamespace(model=None, state="running", stats=None)}
        metrics.answered(f"camera-{number}", Answer("?", 0.0, [1, 2, 3], queued_ms=10.0, ttft_ms=100.0))
        streams()
    assert streams() == {"camera-99"}


def test_pieces_of_an_answer_are_sent_at_once(tmp_path):
    """Else each waits for the client to acknowledge the one before, 40 ms on a connection that is kept."""
    undelayed = []

    async def accepted(reader, writer):
        undelayed.append(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async def connect():
        listening = bound("127.0.0.1", 0)
        async with await asyncio.start_server(accepted, sock=listening):
            reader, writer = await asyncio.open_connection(*listening.getsockname())
            await reader.read()
            writer.close()

    asyncio.run(connect())
    assert undelayed == [1]
