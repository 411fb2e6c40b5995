"""The KV cache of DeepSeek-V4, with the names and meanings of the C++ library and arrays without copies.

docs/python.md is the guide.
"""
from . import _kv4
from ._kv4 import *  # noqa: F403
from ._kv4 import __version__
from .errors import (
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
from .representation import add_representations

add_representations(_kv4)

#: A padded item's request.
NO_REQUEST = -1

# A list that type checkers can read; tests/python/test_package.py compares it with the module.
__all__ = [
    "Admission", "ArgumentError", "Arrangement", "Backend", "BlockAllocator", "BlockBudget", "BlockEvent",
    "CacheOptions", "CacheSchema", "CacheStatistics", "CallTimes", "CanonicalImage", "ChunkAction", "ChunkResults", "ChunkStatus", "ChunkStore",
    "ChunkStoreOptions", "ChunkStoreReport", "ClassicalView", "ConfigError", "ContextBudget", "DType",
    "DeviceFailureError", "Engram", "EntrySharing", "Error", "EvictionKind", "FileError", "FlushStatus", "Format", "HcaMode", "HostMemory",
    "IndexerView", "KVCacheManager", "LayerCacheHandle", "LayerCacheSchema", "LayerKind", "LayerSpec",
    "LogLevel", "LogRecord", "MemoryPart", "MemoryPlan", "ModelConfig", "NO_REQUEST", "NoDeviceError",
    "OutOfMemoryError", "PageLayout", "PageSchema", "PagedKVPool", "PendingSchema", "PreemptedRequest",
    "PrefixBlock", "PrefixLoad", "PrefixOptions", "PrefixStatistics", "Prompt", "Protection", "RopeSpec", "RowKind", "RowRole", "RowSchema",
    "RowsView", "SWAView", "ScoreMode", "SessionIdentity", "SessionReceiver", "SessionSender", "Shortage", "ShortageCounts", "ShortageError",
    "SnapshotPolicy", "StateCachePool", "StateError", "StatusFolder", "Step", "StepItem", "TenantUse", "TierReport", "TierStats",
    "TieredOptions", "TieredPrefix", "TieredStatistics", "Tiers", "TiersOptions", "TimeHistogram", "TokenHistogram", "WindowSchema", "__version__",
    "build_rope_table", "build_schema", "compute_block_budget", "compute_context_budget", "copy_from_pages",
    "copy_to_pages", "cpu_target", "entry_rows", "image_bytes", "interleaved_pages", "layer_schedule",
    "load_model_config", "make_cpu_backend", "make_cuda_backend", "model_preset", "parse_model_config",
    "plan_memory", "planar_pages", "preempt", "preempted_bytes", "read_key_file", "restore_session", "restore_session_file",
    "resume", "save_session", "save_session_file", "set_log_sink", "validate", "why_no_cuda", "window_rows",
]
