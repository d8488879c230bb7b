"""The cache and its kernels on a CUDA device. Nothing here imports a CUDA package until a device is needed."""
