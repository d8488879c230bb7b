"""What retrieval policies share: the working set, clusters, and what is counted. The policies are in ``runtime/policies``."""
