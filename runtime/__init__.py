"""The runtime, which watches a stream within a fixed memory budget: cache, policies, positions and sessions."""
