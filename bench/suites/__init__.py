"""The registry of published benchmarks: one file and one line each. docs/benchmarks.md says where their data is had."""

from __future__ import annotations

from importlib import import_module

from edgevlm.bench.suites.schema import Suite

SUITES = {
    "streamingbench": "edgevlm.bench.suites.streamingbench",
    "ovobench": "edgevlm.bench.suites.ovobench",
    "videomme": "edgevlm.bench.suites.videomme",
    "mlvu": "edgevlm.bench.suites.mlvu",
    "egoschema": "edgevlm.bench.suites.egoschema",
    "mvbench": "edgevlm.bench.suites.mvbench",
    "longvideobench": "edgevlm.bench.suites.longvideobench",
    "rvs": "edgevlm.bench.suites.rvs",
    "coin": "edgevlm.bench.suites.coin",
}


def suite_of(name: str) -> Suite:
    """The suite of a name in :data:`SUITES`."""
    found: Suite = import_module(SUITES[name]).SUITE
    return found
