"""V-Rex's accelerator as a small analytic model, beside the figures of its paper. ``docs/vrex.md`` has the equations.

``paper.json`` is what the paper says, each figure with its place; ``paper`` reads it, ``analytic`` has the equations,
``calibrated`` the four constants that are taken from one figure each, ``predict`` what is compared, ``ratios`` retrieval ratios
that were measured here.
"""
