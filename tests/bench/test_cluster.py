"""The simulation of a cluster: its counts agree with each other, and the same seed plays the same month."""

from edgevlm.bench.cluster import cluster
from edgevlm.bench.schemas import FIELDS

MEASURED = ("head_cpu", "head_bytes")


def played(**settings):
    (line,) = cluster(**{"nodes": 20, "cameras": 100, "days": 10.0, "seed": 1, **settings})
    return line


def test_nodes_fail_and_no_camera_is_watched_twice():
    line = played()
    assert line["twice"] == 0
    assert line["faults"] > 10
    assert line["moves"] > line["faults"] / 4
    assert 0.99 < line["availability"] < 1
    assert 0 < line["recover_s_p50"] <= line["recover_s_p95"] <= line["recover_s_p99"] < 600
    assert line["head_bytes"] > line["file_bytes"] > 1000
    assert 0 < line["head_cpu"] < 1
    assert {f"{name}?" for name in line.keys() - {"bench"}} <= FIELDS.keys()
    same, other = played(), played(seed=2)
    assert {name: same[name] for name in line if name not in MEASURED} == {k: line[k] for k in line if k not in MEASURED}
    assert other["faults"] != line["faults"] or other["moves"] != line["moves"]


def test_cameras_that_fit_nowhere_count_as_unwatched():
    """Nodes that are full have no room for those of a lost one."""
    full = played(nodes=4, cameras=4 * 15)
    assert full["refused"] > 0
    assert full["recover_s_p99"] > played()["recover_s_p99"]
