// kv4: the KV cache of DeepSeek-V4 as a library. Start at kv_cache_manager.h.
#pragma once

#include "kv4/backend.h"
#include "kv4/block_allocator.h"
#include "kv4/error.h"
#include "kv4/kv_cache_manager.h"
#include "kv4/layer_cache_handle.h"
#include "kv4/model_config.h"
#include "kv4/options.h"
#include "kv4/paged_kv_pool.h"
#include "kv4/schema.h"
#include "kv4/state_cache_pool.h"
#include "kv4/tensor.h"
#include "kv4/version.h"
