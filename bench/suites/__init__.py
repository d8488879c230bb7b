"""List the published benchmarks. docs/internals/published-benchmarks.md says where to get their data."""

GUIDE = "docs/internals/published-benchmarks.md"
SUITES = ("streamingbench", "ovobench")
LMMS_EVAL = {  # benchmark of whole videos -> its task in lmms-eval
    "videomme": "videomme",
    "mlvu": "mlvu_dev",
    "egoschema": "egoschema_subset",
    "mvbench": "mvbench",
    "longvideobench": "longvideobench_val_v",
}
