"""The TensorRT backend, which runs engines that ``edgevlm build`` built from a bundle's graphs on the target device.

We have not yet built or run a TensorRT engine; docs/internals/engines.md lists what we checked instead.
"""
