"""Code that retrieval policies share: the working set and pages of clusters. The policies are in ``runtime/policies``."""
