"""Working memory of the engine: kept from call to call, and given back while the system is short of it."""

import numpy as np
import psutil

from edgevlm.runtime.model import Model

MB = 1e6


def test_while_memory_is_short_calls_give_back_what_they_took():
    model, process = Model.load("demo", threads=1), psutil.Process()
    pixels = np.random.default_rng(0).standard_normal((512, 3, *model.bundle.vision.size), np.float32)

    def rss_after(frames):
        features = model.engine.encode(pixels[:frames])
        return process.memory_info().rss, features

    before, alone = rss_after(1)
    most, _ = rss_after(512)
    assert most - before > 30 * MB
    assert rss_after(1)[0] > most - 10 * MB, "ONNX Runtime keeps it"
    model.engine.spare(True)
    spared, again = rss_after(1)
    assert spared < most - (most - before) / 2
    np.testing.assert_array_equal(again, alone)
    model.engine.spare(False)
    np.testing.assert_array_equal(rss_after(1)[1], alone)
    model.close()
