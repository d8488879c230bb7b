#!/usr/bin/env bash
# Build the wheel for aarch64 with a cross compiler and test it in an emulator, on NEON: the tests of the cache and the policies,
# then `edgevlm run`. Python is Debian's for aarch64, its packages are PyPI's; both are fetched once into a folder of their own.
# All of it takes the better part of an hour: EVERY=20 takes every 20th test.
# Usage: tests/aarch64.sh [pytest arguments]      PYTHON=... picks the interpreter that builds, EDGEVLM_AARCH64=... the folder.
set -euo pipefail
tree=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-python}
kept=${EDGEVLM_AARCH64:-${XDG_CACHE_HOME:-$HOME/.cache}/edgevlm-aarch64}
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
suite=bookworm version=3.11
debian=(libc6 libgcc-s1 libstdc++6 zlib1g libbz2-1.0 liblzma5 libssl3 libexpat1 libffi8 libsqlite3-0 libuuid1 libcrypt1 libtinfo6
  libncursesw6 libreadline8 "python$version-minimal" "libpython$version-minimal" "libpython$version-stdlib" "libpython$version-dev")
# ONNX Runtime 1.31 ends in qemu 7.2 with a segmentation fault, when it reads of the host's caches under /sys.
pypi=('numpy>=1.24' 'psutil>=5.9' 'tokenizers>=0.20' 'jinja2>=3.1' 'rich>=13' 'typer>=0.12' 'pytest>=8' 'hypothesis>=6.100'
  'onnxruntime==1.23.2')

missing=()
for tool in aarch64-linux-gnu-g++ qemu-aarch64-static apt-get dpkg-deb "$python"; do
  command -v "$tool" >/dev/null || missing+=("$tool")
done
[ -f "$keyring" ] || missing+=("$keyring")
if [ ${#missing[@]} -gt 0 ]; then
  echo "skipped: not found: ${missing[*]} (Debian: apt install g++-aarch64-linux-gnu qemu-user-static debian-archive-keyring)"
  exit 0
fi
mkdir -p "$kept"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

fetch_root() {  # Debian's packages, unpacked beside this system and not into it
  echo "== Debian $suite's Python $version for aarch64 into $kept/root"
  mkdir -p "$work/apt/lists/partial" "$work/apt/cache/archives/partial" "$work/debs"
  : >"$work/apt/status"
  echo "deb [signed-by=$keyring] http://deb.debian.org/debian $suite main" >"$work/apt/sources.list"
  local apt=(apt-get -qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Debug::NoLocking=1 -o APT::Sandbox::User=
    -o "Dir::State::Lists=$work/apt/lists" -o "Dir::State::status=$work/apt/status" -o "Dir::Cache=$work/apt/cache"
    -o "Dir::Etc::sourcelist=$work/apt/sources.list" -o Dir::Etc::sourceparts=-)
  "${apt[@]}" update
  (cd "$work/debs" && "${apt[@]}" download "${debian[@]}")
  rm -rf "$kept/root"
  for package in "$work"/debs/*.deb; do dpkg-deb -x "$package" "$kept/root"; done
  echo "${debian[*]}" >"$kept/root/packages"
}

fetch_site() {
  echo "== PyPI's packages for aarch64 into $kept/site"
  local platforms=(--platform manylinux2014_aarch64)
  for glibc in 17 24 26 27 28 31 34; do platforms+=(--platform "manylinux_2_${glibc}_aarch64"); done
  rm -rf "$kept/site"
  "$python" -m pip install --quiet --disable-pip-version-check --target "$kept/site" --only-binary=:all: --python-version "$version" \
    --implementation cp --abi "cp${version/./}" --abi abi3 --abi none "${platforms[@]}" "${pypi[@]}"
  "$python" -m pip install --quiet --disable-pip-version-check --target "$kept/tools" --upgrade 'setuptools>=77' 'pybind11>=2.13'
  echo "${pypi[*]}" >"$kept/site/packages"
}

build() {
  echo "== the wheel, by $(aarch64-linux-gnu-g++ --version | head -1)"
  mkdir "$work/cross" "$work/egg"
  cp "$kept/root/usr/lib/python$version/_sysconfigdata__aarch64-linux-gnu.py" "$work/cross/"
  local include=$kept/root/usr/include
  cd "$tree"
  PYTHONPATH=$work/cross:$kept/tools _PYTHON_HOST_PLATFORM=linux-aarch64 _PYTHON_SYSCONFIGDATA_NAME=_sysconfigdata__aarch64-linux-gnu \
    "$python" setup.py --quiet egg_info --egg-base "$work/egg" build --build-base "$work/build" \
    build_ext -I "$include/python$version:$include" bdist_wheel --bdist-dir "$work/bdist" --dist-dir "$work/dist" \
    >"$work/build.log" 2>&1 || { cat "$work/build.log" >&2; exit 1; }
  cd "$work"  # away from the tree, so that it cannot be imported instead
  echo dist/*
  "$python" -m zipfile -e dist/*.whl lib
  local odd
  odd=$(find lib -name tests -o -name deploy -o -name '*.so' ! -name '_native.*-aarch64-linux-gnu.so')
  [ -z "$odd" ] || { echo "the wheel has what it should not have: $odd" >&2; exit 1; }
}

[ "$(cat "$kept/root/packages" 2>/dev/null)" = "${debian[*]}" ] || fetch_root
[ "$(cat "$kept/site/packages" 2>/dev/null)" = "${pypi[*]}" ] || fetch_site
build

cat >"$work/python" <<RUN
#!/bin/sh
exec qemu-aarch64-static -L "$kept/root" "$kept/root/usr/bin/python$version" "\$@"
RUN
chmod +x "$work/python"
export PYTHONPATH=$work/lib:$kept/site PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

echo "== tests, by $(qemu-aarch64-static --version | head -1)"
cat >"$work/test.py" <<'TEST'
import os, platform, sys
from pathlib import Path

here = Path(__file__).parent
sys.executable = str(here / "python")  # tests start processes of their own, and there is no kernel that could

import pytest
from edgevlm.runtime import _native
from edgevlm.runtime import kernels

assert platform.machine() == "aarch64"
assert Path(_native.__file__).is_relative_to(here), f"the tests would load {_native.__file__}"
assert kernels.simd() == "neon"
print("Python", platform.python_version(), platform.machine(), kernels.simd(), Path(_native.__file__).name, flush=True)


class Thinned:
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = items[:: int(os.environ.get("EVERY", "1"))]


raise SystemExit(pytest.main(sys.argv[1:], plugins=[Thinned()]))
TEST
ignored=()  # what needs torch to make its models
while read -r file; do ignored+=("--ignore=$file"); done < <(grep -rlE '^(import|from) (torch|checkpoints|hf)\b' "$tree"/tests/{cache,policies})
EDGEVLM_SIMD=neon "$work/python" "$work/test.py" "$tree/tests/cache" "$tree/tests/policies" "${ignored[@]}" \
  -c "$tree/pyproject.toml" --rootdir "$tree" -p no:cacheprovider -q "$@"

echo "== edgevlm run"
"$work/python" -m edgevlm run --frames 16 --ask "how many objects are there now?" 2>&1
