"""Clusters: distribute cameras over several machines, and move the cameras of lost nodes."""
