"""Clusters: distribute cameras over several machines, and move them when a node is lost."""
