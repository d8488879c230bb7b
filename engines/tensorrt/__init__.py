"""TensorRT: ``edgevlm build`` makes engines of a bundle's graphs on the device they run on, and the backend runs them.

Only :mod:`~edgevlm.engines.tensorrt.api` imports TensorRT. We have built and run no engine:
docs/internals/engines.md lists the checks.
"""
