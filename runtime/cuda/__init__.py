"""Keep the cache and run its kernels on a CUDA device. CUDA packages are imported only when a device is needed."""
