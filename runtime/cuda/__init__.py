"""The cache and its kernels on a CUDA device. Nothing here imports a CUDA package before a device is asked for."""
