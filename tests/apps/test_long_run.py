"""The demo for 10,000 frames at 512 tokens: constant memory and speed, and answers as good at the end as at the start."""

import statistics

import numpy as np
import psutil
import pytest

from edgevlm.apps.demo.questions import is_about_now, sample
from edgevlm.apps.demo.world import World
from edgevlm.runtime.session import Session

FRAMES, BUDGET, EARLY = 10_000, 512, 200


def ask(session, world, random):
    """Ask one of each kind about now; returns how many were right, of how many, and the times to first token."""
    asked = [(text, answer) for kind, text, answer in sample(world.history, random) if is_about_now(kind)]
    right, times = 0, []
    for text, truth in asked:
        answer = session.ask(text)
        right += answer.text.strip() == truth
        times.append(answer.ttft_ms)  # one at a time, so that none waits for another
    return right, len(asked), times


@pytest.mark.slow
def test_ten_thousand_frames(capsys):
    process, random = psutil.Process(), np.random.default_rng(0)
    early, late, first_times, last_times = [0, 0], [0, 0], [], []
    with Session.open("demo", budget=BUDGET, chunk=4) as session:
        cache = session._stream.cache
        nbytes, allocations = cache.nbytes, cache.allocations
        for seed in range(20):  # answers in the first 200 frames of a stream, over several streams
            early_world = World([7, seed])
            with Session.open(session.model, budget=BUDGET, chunk=4) as short:
                for frame in range(EARLY):
                    short.watch(early_world.step())
                    if frame % 10 == 9:
                        right, asked, _ = ask(short, early_world, random)
                        early = [early[0] + right, early[1] + asked]
        world, rss_start = World(7), None
        for frame in range(FRAMES):
            session.watch(world.step())
            full = session.stats.memory.compressions > 0
            if full and rss_start is None:
                rss_start = process.memory_info().rss
            if full and frame % 4 == 3 and len(first_times) < 300:  # the first full cache
                first_times += ask(session, world, random)[2]
            if frame >= FRAMES - 4000 and frame % 12 == 11:  # at the end of a chunk, as the first ones
                right, asked, times = ask(session, world, random)
                late = [late[0] + right, late[1] + asked]
                last_times = [*last_times, *times][-300:]
        rss_end = process.memory_info().rss
        stats = session.stats
        assert (cache.nbytes, cache.allocations) == (nbytes, allocations)
    early_share, late_share = early[0] / early[1], late[0] / late[1]
    ttft = [statistics.median(times) for times in (first_times, last_times)]
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
