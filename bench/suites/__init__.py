"""Published benchmarks, by name. docs/internals/published-benchmarks.md says where their data is had."""

from __future__ import annotations

from importlib import import_module

from edgevlm.bench.suites.scoring import Suite

SUITES = {
    "streamingbench": "streamingbench:SUITE",
    "ovobench": "ovobench:SUITE",
    "rvs": "rvs:SUITE",
    "coin": "coin:SUITE",
}
LMMS_EVAL = {  # what lmms-eval asks, of whole videos: the benchmark's name here, and its task's there
    "videomme": "videomme",
    "mlvu": "mlvu_dev",
    "egoschema": "egoschema_subset",
    "mvbench": "mvbench",
    "longvideobench": "longvideobench_val_v",
}


def suite_of(name: str) -> Suite:
    """The suite of a name in :data:`SUITES`."""
    module, _, attribute = SUITES[name].partition(":")
    found: Suite = getattr(import_module(f"{__name__}.{module}"), attribute)
    return found
