#!/usr/bin/env bash
# Write runtime/_native.pyi from the built extension; tests/cache/test_builds.py compares the two.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
pybind11-stubgen edgevlm.runtime._native -o "$out" --exit-code >&2
sed -e 's/typing\.SupportsInt | typing\.SupportsIndex/int/g' -e 's/typing\.SupportsFloat | typing\.SupportsIndex/float/g' \
    "$out/edgevlm/runtime/_native.pyi" >"${1:-$root/runtime/_native.pyi}"
