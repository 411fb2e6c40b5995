"""The `kv4` command of a wheel: runs the C++ library's tool, which is in the package."""
import os
import sys
from pathlib import Path


def main() -> None:
    tool = Path(__file__).parent / "bin" / "kv4"
    if not tool.exists():
        sys.exit("kv4: this package was built without the command line tool (KV4_BUILD_CLI=OFF)")
    os.execv(tool, [sys.argv[0], *sys.argv[1:]])
