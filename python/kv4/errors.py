"""The errors that kv4 raises. `code` is the name of the C++ library's ErrorCode."""
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._kv4 import Shortage


class Error(RuntimeError):
    """The message names the value, the allowed values and a remedy. The call has not changed the cache."""

    code = ""


class ConfigError(Error, ValueError):
    """A model config or a cache option that cannot work."""

    code = "bad_config"


class ArgumentError(Error, ValueError):
    """A value, shape, type, device or id outside what the call accepts."""

    code = "bad_argument"


class StateError(Error):
    """A call that is not allowed now, for example commit without a step."""

    code = "bad_state"


class FileError(Error):
    """A file that is truncated, foreign or damaged."""

    code = "bad_file"


class OutOfMemoryError(Error, MemoryError):
    """The machine refused the memory."""

    code = "out_of_memory"


class NoDeviceError(Error):
    """No such GPU, too old a one, or a build without CUDA."""

    code = "no_device"


class DeviceFailureError(Error):
    """A GPU call or kernel failed; the cache's contents are lost."""

    code = "device_failure"


class ShortageError(Error):
    """A resource is exhausted: `shortage` (kv4.Shortage) names it. Wait for a release, or preempt a request."""

    code = "shortage"

    def __init__(self, message: str, shortage: Shortage) -> None:
        super().__init__(message)
        self.shortage = shortage
