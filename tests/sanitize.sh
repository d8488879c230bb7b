#!/usr/bin/env bash
# Build the extension with sanitizers beside the tree, and run tests against that build.
# Usage: tests/sanitize.sh [pytest arguments]    AddressSanitizer and UBSan over the cache's tests
#        tests/sanitize.sh misuse [calls] [seed] the same over generated misuse (tests/fuzz/misuse.py)
#        tests/sanitize.sh states [operations] [seed]  the same over sequences of operations (tests/fuzz/states.py)
#        tests/sanitize.sh attend seed cases     the same over calls of the attention kernel (tests/cache/test_attend.py)
#        tests/sanitize.sh operations [count] [seed]  C++ alone, millions in minutes (tests/fuzz/operations.cpp)
#        tests/sanitize.sh thread [policies]     ThreadSanitizer over caches and sessions that threads share (tests/races.py)
#        tests/sanitize.sh thread states|misuse|attend|operations ..  ThreadSanitizer over those
# PYTHON=... picks the interpreter. ThreadSanitizer sees our C++, pthread locks and nothing else: CPython, numpy and ONNX Runtime
# are not instrumented, and what only they touch is not reported.
set -euo pipefail
tree=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

kind=address,undefined symbols="__asan_report_load __ubsan_handle" libraries="libasan.so libubsan.so" start=__asan_init
if [ "${1:-}" = thread ]; then
    shift
    kind=thread symbols=__tsan_func_entry libraries=libtsan.so start=__tsan_init
fi
program=
case ${1:-} in
misuse | states) program=tests/fuzz/$1.py; shift ;;
attend) program=tests/cache/test_attend.py; shift ;;
esac
export EDGEVLM_SANITIZE=$kind
export ASAN_OPTIONS=detect_leaks=0:halt_on_error=1:abort_on_error=1:allocator_may_return_null=1
export UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1
export TSAN_OPTIONS=halt_on_error=1:ignore_noninstrumented_modules=1:report_signal_unsafe=0
cd "$tree"
if [ "${1:-}" = operations ]; then
    sources=$(grep -L "pybind11\|arrays.h\|kernels_api.h" runtime/csrc/*.cpp)
    ${CXX:-g++} -std=c++17 -O2 -g -Wall -Wextra -fsanitize=$kind -fno-omit-frame-pointer -pthread -Iruntime/csrc \
        tests/fuzz/operations.cpp $sources -o "$work/operations"
    ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=1 setarch -R "$work/operations" "${@:2}"
    exit
fi
"$python" setup.py --quiet build_py --build-lib "$work/lib" 2>"$work/build_py.log" || { cat "$work/build_py.log" >&2; exit 1; }
"$python" setup.py --quiet build_ext --build-lib "$work/lib" --build-temp "$work/temp"
cd "$work"  # away from the tree, so that it cannot be imported instead

gcc=${CC:-gcc}
preload=
for library in $libraries; do preload="$preload $($gcc -print-file-name=$library)"; done
export PYTHONPATH=$work/lib:$tree/tests PYTHONMALLOC=malloc PYTHONDONTWRITEBYTECODE=1
run() { LD_PRELOAD=$preload setarch -R "$python" "$@"; }  # ThreadSanitizer's shadow memory wants addresses where they were

run - "$work" $start $symbols <<'CHECK'
import ctypes, sys
from edgevlm.runtime import _native

folder, start, *symbols = sys.argv[1:]
assert _native.__file__.startswith(folder), f"the tests would load {_native.__file__}"
code = open(_native.__file__, "rb").read()
for symbol in symbols:
    assert symbol.encode() in code, f"{_native.__file__} is not instrumented: no {symbol}"
assert hasattr(ctypes.CDLL(None), start), "the sanitizer is not loaded"
print("sanitized:", _native.__file__)
CHECK
if [ $program ]; then
    run "$tree/$program" "$@"
elif [ $kind = thread ]; then
    run "$tree/tests/races.py" "$@"
else
    run -m pytest "$tree/tests/cache" -c "$tree/pyproject.toml" --rootdir "$tree" -p no:cacheprovider "$@"
fi
