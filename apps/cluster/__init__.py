"""Cameras over several machines: which node watches which, and what happens when one is lost."""
