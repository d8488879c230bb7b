#!/usr/bin/env bash
# Install pycuda for the tests that reach CUDA through tests/cuda_shim: compiled where there is no GPU, against NVIDIA's headers from PyPI and
# empty libraries. The wheel is kept in the user's cache. usage: tests/pycuda.sh PYTHON
set -euo pipefail
python=$(realpath --no-symlinks "${1:-python}")
kept=${XDG_CACHE_HOME:-$HOME/.cache}/edgevlm-tests/pycuda-$("$python" -c 'import sys; print(sys.implementation.cache_tag)')
if ! compgen -G "$kept/*.whl" >/dev/null; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    cd "$work"
    "$python" -m pip install --quiet --no-deps --target cuda 'nvidia-cuda-nvcc>=13,<14' 'nvidia-cuda-runtime>=13,<14' \
        'nvidia-cuda-crt>=13,<14' 'nvidia-cuda-profiler-api>=13,<14' 'nvidia-curand>=10,<11'
    root=$work/cuda/nvidia/cu13
    mkdir stubs
    for name in cuda curand; do gcc -shared -fPIC -o "stubs/lib$name.so" -x c - </dev/null; done
    "$python" -m pip download --quiet --no-deps --no-binary pycuda pycuda
    tar xzf pycuda-*.tar.gz
    cd pycuda-*/
    "$python" -m pip install --quiet setuptools wheel
    "$python" configure.py --cuda-root "$root" --cuda-inc-dir "$root/include"
    LIBRARY_PATH=$work/stubs "$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$work/dist" .
    mkdir -p "$kept"
    mv "$work"/dist/*.whl "$kept"
fi
"$python" -m pip install --quiet "$kept"/*.whl
