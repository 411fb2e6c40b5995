#!/usr/bin/env bash
# Builds the wheel that serves Python 3.12 and all later versions, and runs it in each of these that is installed.
#   tests/install/abi3_wheel.sh --list      those Pythons that have their headers; status 1 without any
#   tests/install/abi3_wheel.sh PYTHON...
set -euo pipefail
cd "$(dirname "$0")/../.."

if [[ "${1:-}" == --list ]]; then
  usable="import pathlib, sys, sysconfig, venv
assert sys.version_info >= (3, 12) and pathlib.Path(sysconfig.get_path('include'), 'Python.h').exists()
print(sys.executable)"
  found=()
  for python in python3 python3.{12..19} "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python3; do
    where="$("$python" -c "$usable" 2>/dev/null)" && [[ " ${found[*]} " != *" $where "* ]] && found+=("$where")
  done
  ((${#found[@]})) || exit 1
  printf '%s\n' "${found[@]}"
  exit
fi

(($# > 0)) || { sed -n '3,4s/^# \?//p' "$0" >&2; exit 2; }
temp="$(mktemp -d)"
trap 'rm -rf "$temp"' EXIT
KV4_CUDA=OFF KV4_PYTHON="$1" tools/build_wheel "$temp/wheels"
wheel="$(ls "$temp"/wheels/*.whl)"
[[ "$(basename "$wheel")" =~ ^kv4-[0-9.]+-cp312-abi3-manylinux_2_([0-9]+)_[a-z0-9_]+\.whl$ ]] && ((BASH_REMATCH[1] <= 34)) || {
  echo "abi3_wheel: $(basename "$wheel") is no kv4-...-cp312-abi3-manylinux_2_34_... (or lower)" >&2
  exit 1
}
number=0
for python in "$@"; do
  environment="$temp/venv$((number++))"
  "$python" -m venv "$environment"
  "$environment/bin/python" -m pip install --quiet --disable-pip-version-check "$wheel" pytest
  echo "$("$environment/bin/python" --version):"
  PYTHONDONTWRITEBYTECODE=1 "$environment/bin/python" -m pytest -q -p no:cacheprovider tests/python
  "$environment/bin/kv4" --version
done
