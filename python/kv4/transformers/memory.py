"""Free memory at the place of a cache."""
from __future__ import annotations

from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")


def _host_bytes() -> int | None:
    """Memory that is available without swapping, within the limit of the control group."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None
    try:
        limit, used = (int((CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        cached = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(cached.get("inactive_file", 0)))
    except (OSError, ValueError):  # no control group, or one without a limit ("max")
        pass
    return free


def free_bytes(device: torch.device) -> int | None:
    """None: unknown."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _host_bytes()


def in_words(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
