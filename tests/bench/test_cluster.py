"""The simulation of a cluster: its counts agree with each other, and the same seed plays the same month."""

import pytest

from edgevlm.apps.cluster import director
from edgevlm.apps.cluster.placement import Camera, Node
from edgevlm.bench import cluster as simulation
from edgevlm.bench.cluster import cluster
from edgevlm.bench.scaling import makespan, scaling
from edgevlm.bench.schemas import Bench
from edgevlm.errors import UserError

MEASURED = ("head_cpu", "head_bytes")


def played(**settings):
    return list(cluster(**{"nodes": 20, "cameras": 100, "days": 10.0, "seed": 1, **settings}))


def test_nodes_fail_and_no_camera_is_watched_twice():
    line, *days = played()
    assert line["twice"] == 0
    assert line["faults"] > 10
    assert line["moves"] > line["faults"] / 4
    assert 0.99 < line["availability"] < 1
    assert 0 < line["recover_s_p50"] <= line["recover_s_p95"] <= line["recover_s_p99"] < 600
    assert line["head_bytes"] > line["file_bytes"] > 1000
    assert 0 < line["head_cpu"] < 1
    assert [day["day"] for day in days] == list(range(1, 11))
    for name in ("faults", "moves"):
        assert sum(day[name] for day in days) == line[name]
    assert sum(day["availability"] for day in days) / 10 == pytest.approx(line["availability"])
    assert line.keys() - {"bench"} <= Bench.model_fields.keys()
    same, other = played()[0], played(seed=2)[0]
    assert {name: same[name] for name in line if name not in MEASURED} == {k: line[k] for k in line if k not in MEASURED}
    assert other["faults"] != line["faults"] or other["moves"] != line["moves"]


def test_a_head_that_gives_cameras_away_early_is_counted(monkeypatch):
    """A node that is cut off watches until its lease ends."""
    for module in (director, simulation):
        monkeypatch.setattr(module, "GRACE_S", 1.0 - director.LEASE_S)
    nodes = [Node(f"node{number}", "large", simulation.KINDS["large"]) for number in range(20)]
    cameras = [Camera(f"camera{number}", "model", 2.0) for number in range(100)]
    assert simulation.Simulation(nodes, cameras, simulation.NEEDS, 30.0, 1).run(lambda words: None).twice > 0


def test_cameras_that_fit_nowhere_count_as_unwatched():
    """Nodes that are full have no room for those of a lost one."""
    full = played(nodes=4, cameras=4 * 15)[0]
    assert full["refused"] > 0
    assert full["recover_s_p99"] > played()[0]["recover_s_p99"]


def test_pieces_are_taken_by_whoever_is_free_first():
    pieces = [3.0, 1.0, 1.0, 1.0, 4.0]
    assert [makespan(pieces, workers) for workers in (1, 2, 3, 8)] == [10.0, 7.0, 5.0, 4.0]


@pytest.mark.slow
def test_scaling_is_timed_and_predicted():
    pytest.importorskip("ray")
    lines = list(scaling(streams=1, frames=16, policy=["uniform"], budget="50%"))
    assert [line["workers"] for line in lines[:3]] == [1, 2, 4]
    assert all((line["wall_s"] is None) == (line["workers"] > 2) for line in lines)
    first, second, *more = lines
    assert first["pieces"] == 2
    assert first["predicted_s"] == pytest.approx(first["wall_s"], abs=0.02), "it is what the model is made of"
    assert second["error"] is not None
    assert first["start_s"] < min(line["predicted_s"] for line in more)
    assert {name for line in lines for name in line.keys() - {"bench"}} <= Bench.model_fields.keys()
    with pytest.raises(UserError, match="rising numbers that begin with 1"):
        list(scaling(workers="2,4"))
