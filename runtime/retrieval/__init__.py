"""Code that retrieval policies share: the working set, clusters, and counters. The policies are in ``runtime/policies``."""
