"""The KV cache of DeepSeek-V4: names and meanings of the C++ library, arrays without copies.

docs/python.md is the guide.
"""
from ._kv4 import *  # noqa: F401,F403
from ._kv4 import __version__  # noqa: F401
from .errors import (  # noqa: F401
    ArgumentError,
    ConfigError,
    DeviceFailureError,
    Error,
    FileError,
    NoDeviceError,
    OutOfMemoryError,
    ShortageError,
    StateError,
)

#: A padded item's request.
NO_REQUEST = -1
