"""Checks the packages that kv4.transformers needs, before any of them is used."""
import importlib
import re
from types import ModuleType

#: Versions of transformers whose DeepSeek-V4 and Cache this package knows: FIRST <= version < BEYOND.
FIRST, BEYOND = (5, 17), (6, 0)
HINT = "pip install torch 'transformers>=5.17,<6'"


def _required(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise ImportError(f"kv4.transformers needs {name}, which is not installed: {HINT}", name=name) from None


def check_version(version: str) -> None:
    """Raises ImportError unless FIRST <= version < BEYOND."""
    series = tuple(int(number) for number in re.findall(r"\d+", f"{version}.0")[:2])
    if not FIRST <= series < BEYOND:
        raise ImportError(f"kv4.transformers needs transformers from 5.17 on, before 6; {version} is installed: {HINT}")


_required("torch")
check_version(_required("transformers").__version__)
