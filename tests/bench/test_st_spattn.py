"""The bench of sparse prefill on a tiny shape: it runs, and says what it measured."""

from edgevlm.bench.st_spattn import prefill_pattern

SHAPE = {"tokens_per_frame": 6, "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "head_dim": 8, "intermediate": 48}


def test_a_line_for_each_size_of_the_memory():
    lines = list(prefill_pattern(**SHAPE, held=(12, 40), frames=2, st_spattn_from=1, repeats=1, threads=1))
    assert [line["held"] for line in lines] == [12, 40]
    for line in lines:
        assert line["bench"] == "prefill-pattern"
        assert (line["frames"], line["st_spattn_from"], line["threads"]) == (2, 1, 1)
        assert all(line[key] == value for key, value in SHAPE.items() if key != "intermediate")
        assert line["dense_ms"] > 0 < line["st_spattn_ms"]
