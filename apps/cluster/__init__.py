"""Cameras over several machines: their placement on nodes, and moves when a node is lost."""
