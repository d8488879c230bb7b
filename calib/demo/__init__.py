"""The demo: a procedural camera, questions about it, and the tiny model that answers them."""
