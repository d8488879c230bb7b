"""The demo for 10,000 frames at 512 tokens: constant memory and speed, and answers as good at the end as at the start."""

import statistics

import numpy as np
import psutil
import pytest

from edgevlm.calib.demo.questions import is_about_now, sample
from edgevlm.calib.demo.world import World
from edgevlm.runtime.session import Session

FRAMES, BUDGET, EARLY, PAIRS = 10_000, 512, 200, 300


def opened(model="demo"):
    return Session.open(model, budget=BUDGET, chunk=4, append="all")


def ask(session, world, random):
    """Ask one of each kind about now; returns how many were right, and of how many."""
    asked = [(text, truth) for kind, text, truth in sample(world.history, random) if is_about_now(kind)]
    return sum(session.ask(text).text.strip() == truth for text, truth in asked), len(asked)


def times_to_first_token(old):
    """Medians in ms: of a stream at its first full cache, and of ``old`` when it holds as much; asked in turns."""
    world, times = World(8), ([], [])
    with opened(old.model) as young:
        while not young.stats.memory.compressions or young.stats.tokens != old.stats.tokens:
            young.watch(world.step())
        for _ in range(PAIRS):
            for session, those in zip((young, old), times, strict=True):
                answer = session.ask("how many objects are there now?")
                answer.wait()
                those.append(answer.ttft_ms)
    return [statistics.median(those) for those in times]


@pytest.mark.slow
def test_ten_thousand_frames(capsys):
    process, random = psutil.Process(), np.random.default_rng(0)
    early, late = [0, 0], [0, 0]
    with opened() as session:
        cache = session.cache
        nbytes, allocations = cache.nbytes, cache.allocations
        for seed in range(20):  # answers in the first 200 frames of a stream, over several streams
            early_world = World([7, seed])
            with opened(session.model) as short:
                for frame in range(EARLY):
                    short.watch(early_world.step())
                    if frame % 10 == 9:
                        early = np.add(early, ask(short, early_world, random))
        world, rss_start = World(7), None
        for frame in range(FRAMES):
            session.watch(world.step())
            if rss_start is None and session.stats.memory.compressions:
                rss_start = process.memory_info().rss
            if frame >= FRAMES - 4000 and frame % 12 == 11:
                late = np.add(late, ask(session, world, random))
        rss_end, stats = process.memory_info().rss, session.stats
        assert (cache.nbytes, cache.allocations) == (nbytes, allocations)
        ttft = times_to_first_token(session)
    early_share, late_share = early[0] / early[1], late[0] / late[1]
    with capsys.disabled():
        print(
            f"\n{FRAMES} frames at {BUDGET} tokens: cache {nbytes} bytes in {allocations} allocation(s); RSS "
            f"{rss_start / 1e6:.1f} -> {rss_end / 1e6:.1f} MB ({100 * (rss_end / rss_start - 1):+.2f} %); about now "
            f"{early_share:.3f} of {early[1]} in the first {EARLY} frames, {late_share:.3f} of {late[1]} in the last 4,000; "
            f"TTFT {ttft[0]:.2f} -> {ttft[1]:.2f} ms ({100 * (ttft[1] / ttft[0] - 1):+.1f} %); "
            f"{stats.memory.compressions} compressions, {stats.memory.reindexings} re-indexings"
        )
    assert stats.memory.reindexings > 100
    assert abs(rss_end / rss_start - 1) < 0.02
    assert late_share > early_share - 0.03
