"""Published benchmarks, by name. docs/internals/published-benchmarks.md says where their data is had."""

from __future__ import annotations

from importlib import import_module

from edgevlm.bench.suites.scoring import Suite

SUITES = {
    "streamingbench": "streamingbench:SUITE",
    "ovobench": "ovobench:SUITE",
    "videomme": "offline:VIDEOMME",
    "mlvu": "offline:MLVU",
    "egoschema": "offline:EGOSCHEMA",
    "mvbench": "offline:MVBENCH",
    "longvideobench": "offline:LONGVIDEOBENCH",
    "rvs": "rvs:SUITE",
    "coin": "coin:SUITE",
}


def suite_of(name: str) -> Suite:
    """The suite of a name in :data:`SUITES`."""
    module, _, attribute = SUITES[name].partition(":")
    found: Suite = getattr(import_module(f"{__name__}.{module}"), attribute)
    return found
