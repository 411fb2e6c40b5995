// Python's KVCacheManager and LayerCacheHandle: the library's, with the state that a Python caller would have to keep.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "arrays.h"
#include "device.h"
#include "kv4/kv_cache_manager.h"

namespace kv4::python {

struct Cache {
  std::shared_ptr<Device> device;
  std::unique_ptr<KVCacheManager> manager;
  std::map<int, std::vector<nb::ndarray<nb::ro>>> weights;  // bound weights: they are not copied, so they are kept
  std::vector<nb::ndarray<nb::ro>> rope_table;
  /// The open step, for the sizes of the arrays that calls make.
  struct Item {
    std::int64_t length = 0;
    std::int64_t count = 0;
  };
  std::vector<Item> items;
  std::int64_t num_tokens = 0;

  ~Cache() {
    device->at_end([&] { manager.reset(); });
  }

  template <class Call>
  auto work(Call&& call) {
    return device->work([&] { return call(*manager); });
  }
  template <class Call>
  auto work_on(nb::handle stream, Call&& call) {
    return device->work_on(*manager, device->choose_stream(stream), [&] { return call(*manager); });
  }
};

/// The calls about prefix blocks (prefix.cc).
void def_prefix(nb::class_<Cache>& cache);
void def_statistics(nb::class_<Cache>& cache);

/// Keeps its cache alive (nb::keep_alive where it is made).
struct Layer {
  Cache* cache;
  LayerCacheHandle handle;

  const LayerCacheSchema& schema() const { return handle.schema(); }
  std::int64_t num_items() const { return static_cast<std::int64_t>(cache->items.size()); }
  /// The longest item's entries after the step, at least 1.
  std::int64_t most_entries() const {
    std::int64_t most = 1;
    if (!schema().pages.empty())
      for (const Cache::Item& item : cache->items)
        most = std::max(most, (item.length + item.count) / schema().pages[0].kind.ratio);
    return most;
  }
  std::int64_t most_window_rows() const {
    std::int64_t most = 1;
    const std::int64_t window = cache->manager->schema().config.window;
    for (const Cache::Item& item : cache->items) most = std::max(most, std::min(item.length, window - 1) + item.count);
    return most;
  }
};

}  // namespace kv4::python
