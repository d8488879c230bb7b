#!/usr/bin/env bash
# Build the extension with AddressSanitizer and UBSan beside the tree, and run the cache's tests against that build.
# Usage: tests/sanitize.sh [pytest arguments]      PYTHON=... picks the interpreter.
set -euo pipefail
tree=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

export EDGEVLM_SANITIZE=address,undefined
cd "$tree"
"$python" setup.py --quiet build_py --build-lib "$work/lib" 2>"$work/build_py.log" || { cat "$work/build_py.log" >&2; exit 1; }
"$python" setup.py --quiet build_ext --build-lib "$work/lib" --build-temp "$work/temp"
cd "$work"  # away from the tree, so that it cannot be imported instead

gcc=${CC:-gcc}
export LD_PRELOAD="$($gcc -print-file-name=libasan.so) $($gcc -print-file-name=libubsan.so)"
export ASAN_OPTIONS=detect_leaks=0:halt_on_error=1:abort_on_error=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export PYTHONPATH=$work/lib PYTHONMALLOC=malloc PYTHONDONTWRITEBYTECODE=1

"$python" - "$work" <<'CHECK'
import ctypes, sys
from edgevlm.runtime import _native

assert _native.__file__.startswith(sys.argv[1]), f"the tests would load {_native.__file__}"
code = open(_native.__file__, "rb").read()
for symbol in (b"__asan_report_load", b"__ubsan_handle"):
    assert symbol in code, f"{_native.__file__} is not instrumented: no {symbol.decode()}"
assert hasattr(ctypes.CDLL(None), "__asan_init"), "AddressSanitizer is not loaded"
print("sanitized:", _native.__file__)
CHECK
"$python" -m pytest "$tree/tests/cache" -c "$tree/pyproject.toml" --rootdir "$tree" -p no:cacheprovider "$@"
