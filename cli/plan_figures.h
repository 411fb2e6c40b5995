// The figures of `kv4 plan`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kv4/schema.h"

namespace kv4::cli {

/// GPUs, and the weights in their memory beside the cache. Both are assumed to spread evenly.
struct Machine {
  std::int64_t gpus = 1;
  std::optional<std::int64_t> gpu_bytes, weight_bytes;  // per GPU; of all weights
};

/// The question: the context and requests, or as much of them as fits into memory.
struct PlanWish {
  ModelConfig config;
  CacheOptions options;  // formats and fixed sizes; context, requests and blocks are filled in
  std::optional<std::int64_t> context;
  std::optional<std::int64_t> requests;
  std::optional<std::int64_t> memory;  // available to the cache: all GPUs, without the weights
};

/// Stored rows of one kind in all layers of one kind.
struct RowFigures {
  std::string name;  // "CSA entries"
  int layers = 0;
  int rows_per_block = 0;
  int row_bytes = 0;
  std::int64_t block_bytes = 0;  // all layers
};

/// A part of the state slot in all layers of one kind.
struct StateFigures {
  std::string name;  // "CSA window"
  int layers = 0;
  std::int64_t bytes = 0;
};

/// The paper counts payload and scales of DeepSeek's own formats, without padding, blocks or compressor state.
struct PaperCount {
  double bytes_per_token = 0;
  std::int64_t window_bytes_per_request = 0;
  double bytes(std::int64_t requests, std::int64_t context) const;
};

/// Bytes of a V4.1 request's canonical image at some length.
struct ImageFigures {
  std::string length;  // "128, 130, ..."
  std::int64_t bytes = 0;
};

/// A way to resume a V4.1 request at a block boundary H that has the blocks of [0, H).
struct BoundaryFigures {
  std::string name;
  std::int64_t bytes = 0;         // besides the blocks
  std::int64_t token_ids = 0;     // the last ones before H
  std::int64_t replayed = 0;      // tokens that run again in the first layer
  std::int64_t token_layers = 0;  // summed over all layers
};

struct Fit {
  std::int64_t requests = 0;  // 0: not even one fits
  std::int64_t context = 0;   // tokens of each
  std::int64_t total_bytes = 0;
};

struct PlanFigures {
  CacheSchema schema;
  MemoryPlan plan;
  BlockBudget budget;
  std::vector<RowFigures> rows;
  std::vector<StateFigures> state;
  PaperCount paper;
  std::vector<ImageFigures> images;         // V4.1
  std::vector<BoundaryFigures> boundaries;  // V4.1
  std::optional<Fit> longest_context;  // with memory: the context of each of `requests`
  std::optional<Fit> most_requests;    // with memory: how many requests of `context`
};

inline constexpr const char* kNoWeightsText =
    "The model's weights are not counted; --weights BYTES takes them into account";

/// Throws Error where nothing fits into the memory; it names a plan that would.
PlanFigures compute_plan(const PlanWish& wish);

}  // namespace kv4::cli
