"""Why a cut and an uncut decoder of whole numbers differ: not by the cut.

Rounding activations (``accuracy_level`` 4) turns a difference in a last bit into one of a step of 127ths wherever a number lies
between two codes. Attention computed elsewhere, in another order of additions, differs in last bits; so does a call of other
rows. With level 0 the two agree as two computations in float32 do.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint
from cut_decoder import CutDecoder
from runner import Runner

from edgevlm.export import export_checkpoint
from edgevlm.export.precisions import Precision, int4

ROWS = 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: Any) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("cut"), "llava", layers=3, heads=6, kv_heads=2, side=2, vision_layers=1)


def logits(checkpoint: Path, folder: Path, level: int, monkeypatch: Any) -> dict[str, np.ndarray]:
    """The same rows: in one call, one by one, a last bit away, and cut."""
    plain = int4.PRECISION
    precision = Precision(replace(plain.matrices, level=level), replace(plain.table, level=level))  # type: ignore[type-var]
    monkeypatch.setattr(int4, "PRECISION", precision)
    runner = Runner(export_checkpoint(checkpoint, folder / "bundle", precision="int4"))
    embeds = (np.random.default_rng(4).standard_normal((ROWS, 96)) * 0.3).astype(np.float32)
    tables = runner.tables(np.arange(ROWS, dtype=np.int32))

    def again(rows: np.ndarray) -> np.ndarray:
        runner.past_len[:] = 0
        return runner.decoder.step(rows, *tables, runner.past_len, range(ROWS)).logits

    found = {"whole": again(embeds), "a bit away": again(np.nextafter(embeds, np.float32(9)))}
    runner.past_len[:], runner.position = 0, 0
    found["one by one"] = np.concatenate([runner.step(row[None]).logits for row in embeds])
    found["cut"] = CutDecoder(checkpoint, folder / "cut", precision).logits(embeds, *tables)
    found["unpacked"] = CutDecoder(checkpoint, folder / "unpacked", precision, prepack=False).logits(embeds, *tables)
    return found


def test_it_is_the_rounding_of_activations(checkpoint: Path, tmp_path: Path, monkeypatch: Any) -> None:
    level4 = logits(checkpoint, tmp_path / "4", 4, monkeypatch)
    level0 = logits(checkpoint, tmp_path / "0", 0, monkeypatch)

    def differences(found: dict[str, np.ndarray]) -> dict[str, float]:
        return {name: float(np.abs(x - found["whole"]).max() / found["whole"].std()) for name, x in found.items()}

    rounded, exact = differences(level4), differences(level0)
    print(f"level 4 {rounded}\nlevel 0 {exact}")
    for name in ("a bit away", "one by one", "cut"):
        assert exact[name] < 1e-4
        assert rounded[name] > 10 * exact[name]
    assert exact["unpacked"] < 1e-4
    assert rounded["unpacked"] > 1e-2
    assert np.abs(level4["unpacked"] - level0["cut"]).max() < 1e-4 * level0["cut"].std()
