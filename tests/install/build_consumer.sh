#!/usr/bin/env bash
# Installs a build of kv4 to a temporary prefix, moves it, and builds a small project against it in both usual ways.
#   tests/install/build_consumer.sh BUILD_DIR
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
build="$(cd "${1:?usage: build_consumer.sh BUILD_DIR}" && pwd)"
cache() { sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt"; }
cmake="$(cache CMAKE_COMMAND)"
cxx="$(cache CMAKE_CXX_COMPILER)"

temp="$(mktemp -d)"
trap 'rm -rf "$temp"' EXIT
fail() { echo "install: $1" >&2; exit 1; }

"$cmake" --install "$build" --prefix "$temp/first" >"$temp/install.log" || { cat "$temp/install.log" >&2; fail "cmake --install failed"; }
prefix="$temp/moved here"  # an installed tree may be moved, and a path may hold a space
mv "$temp/first" "$prefix"

library="$(find "$prefix" -name libkv4.so)"
[[ -n "$library" ]] || fail "no libkv4.so was installed"
libdir="$(dirname "$library")"
[[ "$(readelf -d "$library" | sed -n 's/.*SONAME.*\[\(.*\)\]/\1/p')" == libkv4.so.*.* ]] || fail "libkv4.so has no SONAME with a version"
grep -rlI "$build\|$temp/first" "$prefix" && fail "the files above name the build folder or the first prefix"

# Only kv4's own names leave the library (and what the standard library instantiates).
foreign="$(nm -DC --defined-only "$library" | cut -d' ' -f3- | grep -E '(^| )(fmt|nlohmann|hwy|XXH)' || true)"
[[ -z "$foreign" ]] || fail "third-party symbols are exported: $(head -n 3 <<<"$foreign")"

if [[ -e "$build/kv4" ]]; then
  "$prefix/bin/kv4" --help >/dev/null || fail "bin/kv4 --help failed"
fi

# Each public header compiles alone, with the installed tree as the only thing added to the compiler's own; cuda.h, which
# is installed where there is CUDA, also with CUDA's headers.
cuda_headers="$(sed -n 's/^KV4_CUDA_INCLUDE_DIRS:INTERNAL=\([^;]*\).*/\1/p' "$build/CMakeCache.txt")"
for header in "$prefix"/include/kv4/*.h; do
  echo "#include \"kv4/$(basename "$header")\"" >"$temp/alone.cc"
  more=()
  [[ "$(basename "$header")" == cuda.h ]] && more=(-isystem "$cuda_headers")
  "$cxx" -std=c++20 -Wall -Wextra -Werror -fsyntax-only -I"$prefix/include" "${more[@]}" "$temp/alone.cc" || fail "$(basename "$header") does not compile alone"
done

# kv4.h is C.
echo '#include "kv4_chunks.h"' >"$temp/alone.c"  # and with it kv4.h
cc -std=c99 -Wall -Wextra -Wpedantic -Werror -fsyntax-only -I"$prefix/include" "$temp/alone.c" || fail "kv4.h does not compile as C99"

echo "find_package(kv4 CONFIG)"
{
  "$cmake" -S "$here" -B "$temp/by_cmake" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_CXX_COMPILER="$cxx" -DCMAKE_BUILD_TYPE=Release \
    -G "$(cache CMAKE_GENERATOR)" && "$cmake" --build "$temp/by_cmake"
} >"$temp/cmake.log" 2>&1 || { cat "$temp/cmake.log" >&2; fail "the consumer does not build with find_package"; }
"$temp/by_cmake/consumer" || fail "the consumer built with find_package failed ($?)"

echo "pkg-config kv4"
export PKG_CONFIG_PATH="$libdir/pkgconfig"
pkg-config --exact-version="$(cache CMAKE_PROJECT_VERSION)" kv4 || fail "kv4.pc has the wrong version: $(pkg-config --modversion kv4)"
eval "flags=($(pkg-config --cflags --libs kv4))"
"$cxx" -std=c++20 "$here/consumer.cc" -o "$temp/by_pkg_config" "${flags[@]}" || fail "the consumer does not build with pkg-config"
LD_LIBRARY_PATH="$libdir" "$temp/by_pkg_config" || fail "the consumer built with pkg-config failed ($?)"

# The README's code, word for word: its first program in C++, and its lines of C.
echo "README"
block() { awk -v fence='```'"$1" '$0 == fence && !seen { on = seen = 1; next } $0 == "```" { on = 0 } on' "$here/../../README.md"; }
block cpp >"$temp/readme.cc"
{ echo '#include <stdio.h>'; block c | grep '^#'; echo 'int main(void) {'; block c | grep -v '^#'; echo 'return status; }'; } >"$temp/readme.c"
"$cxx" -std=c++20 -Wall -Wextra -Werror "$temp/readme.cc" -o "$temp/readme_cc" "${flags[@]}" || fail "the README's C++ does not compile"
cc -std=c99 -Wall -Wextra -Werror "$temp/readme.c" -o "$temp/readme_c" "${flags[@]}" || fail "the README's C does not compile"
for program in readme_cc readme_c; do
  LD_LIBRARY_PATH="$libdir" "$temp/$program" || fail "the README's program $program failed ($?)"
done
"$here/readme_fragments.py" "$cxx" -std=c++20 -Wall -Wextra -Werror -Wno-unused -I"$prefix/include" || fail "README shows what does not compile"
