#!/usr/bin/env bash
# import-linter on this tree: lays the folders out as the package they become (it does not follow an editable install).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
layout=$(mktemp -d)
trap 'rm -rf "$layout"' EXIT
mkdir "$layout/edgevlm"
ln -s "$root"/edgevlm/* "$root"/{runtime,engines,export,calib,apps,bench} "$layout/edgevlm/"
cd "$layout"
PYTHONPATH=$layout lint-imports --config "$root/pyproject.toml" --no-cache "$@"
