#!/usr/bin/env bash
# Makes the Debian package of a build and checks its metadata, its files, and that the tool runs from an unpacked copy.
#   tests/install/check_package.sh BUILD_DIR
set -euo pipefail
build="$(cd "${1:?usage: check_package.sh BUILD_DIR}" && pwd)"
temp="$(mktemp -d)"
trap 'rm -rf "$temp"' EXIT
fail() { echo "package: $1" >&2; exit 1; }

(cd "$build" && cpack -G DEB -B "$temp/out") >"$temp/log" 2>&1 || { cat "$temp/log" >&2; fail "cpack failed"; }
package="$(find "$temp/out" -maxdepth 1 -name 'kv4_*.deb')"
[[ -n "$package" ]] || fail "no kv4_*.deb was made"
[[ "$(dpkg-deb -f "$package" Package)" == kv4 ]] || fail "it is not named kv4"
[[ -n "$(dpkg-deb -f "$package" Depends)" ]] || fail "it depends on nothing"
version="$(sed -n 's/^CMAKE_PROJECT_VERSION:[A-Z]*=//p' "$build/CMakeCache.txt")"
[[ "$(dpkg-deb -f "$package" Version)" == "$version"* ]] || fail "it is not version $version"
dpkg-deb -x "$package" "$temp/tree"
for file in include/kv4.h include/kv4/kv_cache_manager.h bin/kv4 share/doc/kv4/copyright \
            share/bash-completion/completions/kv4 share/zsh/vendor-completions/_kv4 share/fish/vendor_completions.d/kv4.fish; do
  [[ -e "$temp/tree/usr/$file" ]] || fail "usr/$file is not in it"
done
for name in libkv4.so kv4Config.cmake kv4.pc; do
  [[ -n "$(find "$temp/tree/usr/lib" -name "$name")" ]] || fail "$name is not in it"
done
"$temp/tree/usr/bin/kv4" --version || fail "its kv4 does not run"
echo "$(basename "$package"): $(stat -c %s "$package") bytes"
