#!/usr/bin/env bash
# mypy -p edgevlm on this tree: lays the folders out as the package they become (an editable install is opaque to mypy).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
layout=$(mktemp -d)
trap 'rm -rf "$layout"' EXIT
mkdir "$layout/edgevlm"
ln -s "$root"/edgevlm/* "$root"/{runtime,engines,export,calib,apps,bench} "$layout/edgevlm/"
cd "$layout"
MYPYPATH=$layout python -m mypy --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache" -p edgevlm
