"""TensorRT: ``edgevlm build`` makes engines of a bundle's graphs on the device they run on, and the backend runs them.

:mod:`~edgevlm.engines.tensorrt.api` only imports TensorRT. No engine has been built or run by us:
docs/internals/engines.md lists the checks.
"""
