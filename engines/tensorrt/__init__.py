"""TensorRT: ``edgevlm build`` makes engines of a bundle's graphs on the device they run on, and the backend runs them.

:mod:`~edgevlm.engines.tensorrt.api` only imports TensorRT. We have built and run no engine:
docs/internals/engines.md lists the checks.
"""
