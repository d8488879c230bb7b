"""A stream of a hundred thousand frames through retrieval and eviction policies: what it takes, and what is still known of it.

Each policy runs in a process of its own, one after the other. Every frame is drawn, encoded and appended: none is repeated.
"""
