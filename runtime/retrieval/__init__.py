"""Code that the retrieval policies in ``runtime/policies`` share: the working set, and the pages of clusters."""
