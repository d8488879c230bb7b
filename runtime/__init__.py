"""Watch a stream within a fixed memory budget: cache, policies, positions, sessions."""
