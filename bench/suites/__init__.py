"""Published benchmarks, by name. docs/internals/published-benchmarks.md explains where to get their data."""

GUIDE = "docs/internals/published-benchmarks.md"
SUITES = ("streamingbench", "ovobench")
LMMS_EVAL = {  # benchmarks of whole videos, and their tasks in lmms-eval
    "videomme": "videomme",
    "mlvu": "mlvu_dev",
    "egoschema": "egoschema_subset",
    "mvbench": "mvbench",
    "longvideobench": "longvideobench_val_v",
}
