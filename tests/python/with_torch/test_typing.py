"""The package's types, as a user's mypy --strict sees them."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kv4

# torch and transformers are large and not ours: their types are taken as unknown.
CONFIG = "[mypy]\nstrict = True\n[mypy-torch.*,transformers.*,numpy.*]\nfollow_imports = skip\n"


def errors_of(sample, tmp_path):
    (tmp_path / "mypy.ini").write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--config-file", tmp_path / "mypy.ini", "--cache-dir", tmp_path / "cache", sample]
    environment = dict(os.environ, MYPYPATH=str(Path(kv4.__file__).parents[1]))
    if "site-packages" in kv4.__file__:
        del environment["MYPYPATH"]
    told = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=sample.parent).stdout
    return [line for line in told.splitlines() if line.startswith(sample.name) and ": error:" in line]


def test_a_strictly_typed_program(tmp_path):
    pytest.importorskip("mypy")
    sample = Path(__file__).with_name("typed_sample.py")
    assert errors_of(sample, tmp_path) == []
    wrong = tmp_path / "wrong.py"
    wrong.write_text(sample.read_text().replace("max_batch=2", "max_batch='2'").replace("print(made)", "print(kv4.NOTHING)"))
    assert [line.split("[")[-1] for line in errors_of(wrong, tmp_path)] == ["arg-type]", "attr-defined]"]
