#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "run_checks.h"
#include "run_reference.h"
#include "sizes.h"

namespace kv4::checks {
namespace {

constexpr int kLayersPerKind = 2;
constexpr int kChosen = 64;  // indices per token for gather_compressed_kv

struct Tally {
  std::string name;
  std::int64_t rows = 0;
  double worst = 0;  // error over the allowed error; more than 1 fails
  std::string failure = {};

  void fail(std::string why) {
    if (failure.empty()) failure = std::move(why);
  }
  Check check(const char* what) const {
    return {name, failure.empty(), failure.empty() ? fmt::format("{} rows {}", group_digits(rows), what) : failure};
  }
};

/// One item of the open step.
struct Item {
  const Actor* actor;
  std::int32_t index;
  std::int64_t length;  // after the step
};

const std::byte* row_at(const PlaneView& plane, std::int64_t block, std::int64_t row) {
  return plane.data == nullptr ? nullptr : plane.data + block * plane.block_stride + row * plane.row_stride;
}

struct PagedPlanes {
  PlaneView payload, scale, global;
  std::int32_t rows_per_block = 0, blocks_per_request = 0;
  const std::int32_t *block_table = nullptr, *request_rows = nullptr, *lens = nullptr;

  PlainRow decode(const RowSchema& row, std::int32_t item, std::int64_t entry) const {
    const std::int64_t block =
        block_table[std::int64_t{request_rows[item]} * blocks_per_request + entry / rows_per_block];
    const std::int64_t slot = entry % rows_per_block;
    float second = 1.0f;
    if (const std::byte* at = row_at(global, block, 0)) second = *reinterpret_cast<const float*>(at);
    return decode_plain(row, row_at(payload, block, slot), row_at(scale, block, slot), second);
  }
};

class GatherCheck {
 public:
  GatherCheck(Scenario& scenario, std::vector<Item> items)
      : scenario_(scenario),
        schema_(scenario.manager().schema()),
        items_(std::move(items)),
        model_(schema_, scenario.generator(), scenario.weights()),
        host_(scenario.backend()) {
    StateCachePool& state = scenario.manager().state_pool();
    PagedKVPool& blocks = scenario.manager().kv_pool();
    host_.array(state.base(), state.memory_bytes());
    host_.array(blocks.base(), blocks.memory_bytes());
  }

  void check_layer(std::size_t layer) {
    LayerCacheHandle handle = scenario_.manager().acquire(schema_.layers[layer].spec.layer);
    check_window(handle);
    const LayerCacheSchema& schema = schema_.layers[layer];
    for (std::size_t kind = 0; kind < schema.pages.size(); ++kind) check_rows(handle, layer, kind);
    if (!schema.pages.empty()) check_chosen(handle, schema.pages[0]);
  }
  std::vector<Check> checks() const {
    return {window_.check("equal to their bytes, within half a step of their inputs"),
            all_.check("equal to their bytes"), chosen_.check("equal to their bytes"),
            compressed_.check(
                fmt::format("within half a step, at worst {:.2f} of what is allowed", compressed_.worst).c_str())};
  }

 private:
  std::int32_t num_items() const { return static_cast<std::int32_t>(items_.size()) + 1; }  // and the padded item

  void check_window(LayerCacheHandle& handle);
  void check_rows(LayerCacheHandle& handle, std::size_t layer, std::size_t kind);
  PagedPlanes planes_of(LayerCacheHandle& handle, RowRole role);
  void check_chosen(LayerCacheHandle& handle, const PageSchema& page);
  void check_compressed(const Item& item, std::size_t layer, std::size_t kind, std::int64_t entry, const PlainRow& row);

  Scenario& scenario_;
  const CacheSchema& schema_;
  std::vector<Item> items_;
  PlainModel model_;
  HostCopy host_;  // pools and tables of the step
  Tally window_{.name = "gathered window"}, all_{.name = "gathered entries and keys"},
      chosen_{.name = "gathered choice"}, compressed_{.name = "entries and keys against double precision"};
};

void GatherCheck::check_window(LayerCacheHandle& handle) {
  const int window = schema_.config.window, width = schema_.config.head_dim;
  std::vector<float> out(std::int64_t{num_items()} * window * width);
  std::vector<std::int32_t> lens(num_items()), first(lens.size());
  DeviceTensors tensors(scenario_.backend());
  handle.gather_swa_kv(tensors.out(TensorView(out.data(), {num_items(), window, width})),
                       tensors.out(TensorView(lens.data(), {num_items()})),
                       tensors.out(TensorView(first.data(), {num_items()})));
  tensors.read_back();
  const SWAView view = handle.read_swa_view();
  const PlaneView payload = host_.plane(view.payload), scale = host_.plane(view.scale);
  const std::int32_t* positions = host_.array(view.positions, std::int64_t{num_items()} * view.rows);
  const std::int32_t* slots = host_.array(view.slots, num_items());
  const RowSchema& row = handle.schema().window.row;
  if (lens.back() != 0) window_.fail(fmt::format("a padded item has {} window rows", lens.back()));
  for (const Item& item : items_) {
    const std::size_t at = item.index;
    const std::int64_t expected = std::min<std::int64_t>(item.length, window);
    if (lens[at] != expected || first[at] != item.length - expected) {
      window_.fail(fmt::format("layer {}: window of {} rows from {}, expected {} from {}", handle.layer(), lens[at],
                               first[at], expected, item.length - expected));
      continue;
    }
    for (std::int64_t i = 0; i < expected; ++i) {
      const std::int64_t position = first[at] + i, ring = position % view.rows;
      if (positions[std::int64_t{item.index} * view.rows + ring] != position)
        window_.fail(fmt::format("the ring row of position {} says otherwise", position));
      const PlainRow plain = decode_plain(row, row_at(payload, slots[at], ring), row_at(scale, slots[at], ring), 1.0f);
      const float* got = out.data() + (std::int64_t{item.index} * window + i) * width;
      const std::uint16_t* input = scenario_.generator().bf16_row(item.actor->history.at(position), handle.layer(),
                                                                  InputGenerator::Tensor::raw_kv, width);
      for (int c = 0; c < width; ++c) {
        const std::size_t channel = c;
        const bool near = std::abs(plain.values[channel] - from_bf16(input[c])) <= plain.half_steps[channel] * 1.001f;
        if (got[c] == plain.values[channel] && near) continue;
        window_.fail(fmt::format("layer {} position {} channel {}: gathered {}, stored {}, input {}", handle.layer(),
                                 position, c, got[c], plain.values[channel], from_bf16(input[c])));
      }
      ++window_.rows;
    }
  }
}

PagedPlanes GatherCheck::planes_of(LayerCacheHandle& handle, RowRole role) {
  const auto readable = [&](const auto& view, const PlaneView& payload, const PlaneView& scale,
                            const PlaneView& global) -> PagedPlanes {
    const std::int64_t table = std::int64_t{schema_.options.max_requests} * view.blocks_per_request;
    return {host_.plane(payload),
            host_.plane(scale),
            host_.plane(global),
            view.rows_per_block,
            view.blocks_per_request,
            host_.array(view.block_table, table),
            host_.array(view.request_rows, view.num_items),
            host_.array(view.lens, view.num_items)};
  };
  if (role == RowRole::index_key) {
    const IndexerView view = handle.read_indexer_view();
    return readable(view, view.keys, view.scales, view.global_scale);
  }
  const ClassicalView view = handle.read_classical_view();
  return readable(view, view.payload, view.scale, {});
}

void GatherCheck::check_rows(LayerCacheHandle& handle, std::size_t layer, std::size_t kind) {
  const PageSchema& page = handle.schema().pages[kind];
  const int width = page.row.width;
  std::int64_t longest = 1;
  for (const Item& item : items_) longest = std::max(longest, item.length / page.kind.ratio);
  std::vector<float> out(num_items() * longest * width);
  std::vector<std::int32_t> lens(num_items());
  DeviceTensors tensors(scenario_.backend());
  const TensorView rows = tensors.out(TensorView(out.data(), {num_items(), longest, width})),
                   counts = tensors.out(TensorView(lens.data(), {num_items()}));
  if (page.kind.role == RowRole::entry)
    handle.gather_all_compressed_kv(rows, counts);
  else
    handle.gather_all_index_keys(rows, counts);
  tensors.read_back();

  const PagedPlanes planes = planes_of(handle, page.kind.role);
  for (const Item& item : items_) {
    const std::int64_t expected = item.length / page.kind.ratio;
    const std::int32_t seen = lens[item.index];
    if (seen != expected || planes.lens[item.index] != expected)
      all_.fail(fmt::format("layer {}: {} rows, expected {}", handle.layer(), seen, expected));
    for (std::int64_t entry = 0; entry < std::min<std::int64_t>(expected, seen); ++entry) {
      const PlainRow plain = planes.decode(page.row, item.index, entry);
      const float* got = out.data() + (item.index * longest + entry) * width;
      for (int c = 0; c < width; ++c) {
        const float stored = plain.values[c];
        if (got[c] != stored)
          all_.fail(fmt::format("layer {} row {} channel {}: gathered {}, stored {}", handle.layer(), entry, c, got[c],
                                stored));
      }
      ++all_.rows;
      const bool sampled = entry < 2 || entry + 1 == expected ||
                           (entry * 31 + item.index) % std::max<std::int64_t>(1, expected / 3) == 0;
      if (sampled) check_compressed(item, layer, kind, entry, plain);
    }
  }
}

void GatherCheck::check_compressed(const Item& item, std::size_t layer, std::size_t kind, std::int64_t entry,
                                   const PlainRow& row) {
  const ReferenceRow expected = model_.compressed(item.actor->history, layer, kind, entry);
  for (std::size_t c = 0; c < row.values.size(); ++c) {
    const double distance = std::abs(row.values[c] - expected.values[c]),
                 allowed = row.half_steps[c] + expected.tolerance;
    compressed_.worst = std::max(compressed_.worst, distance / allowed);
    if (!(distance <= allowed)) {
      compressed_.fail(fmt::format("layer {} row {} channel {}: stored {}, expected {} +- {}",
                                   schema_.layers[layer].spec.layer, entry, c, row.values[c], expected.values[c],
                                   allowed));
    }
  }
  ++compressed_.rows;
}

/// Gathers some visible entries, some that do not exist, and -1; bf16 output.
void GatherCheck::check_chosen(LayerCacheHandle& handle, const PageSchema& page) {
  const int width = page.row.width;
  std::vector<std::int32_t> indices(num_items() * kChosen, -1);
  for (const Item& item : items_) {
    const std::int64_t visible = item.length / page.kind.ratio;
    for (int i = 0; i < kChosen; ++i) {
      const std::int64_t wish = (i * 2654435761LL + item.length) % (visible + 4) - 1;  // -1 to visible + 2
      indices[item.index * kChosen + i] = static_cast<std::int32_t>(wish);
    }
  }
  std::vector<std::uint16_t> out(indices.size() * width, 0x7fff);
  std::vector<std::uint8_t> valid(indices.size(), 7);
  DeviceTensors tensors(scenario_.backend());
  handle.gather_compressed_kv(tensors.in(TensorView(indices.data(), {num_items(), kChosen})),
                              tensors.out(TensorView(out.data(), DType::bf16, {num_items(), kChosen, width})),
                              tensors.out(TensorView(valid.data(), DType::u8, {num_items(), kChosen})));
  tensors.read_back();
  const PagedPlanes planes = planes_of(handle, RowRole::entry);
  for (std::size_t i = 0; i < indices.size(); ++i) {
    const auto item = static_cast<std::int32_t>(i / kChosen);
    const bool padded = item + 1 == num_items();
    const std::int64_t visible = padded ? 0 : items_[item].length / page.kind.ratio;
    const bool exists = indices[i] >= 0 && indices[i] < visible;
    if (valid[i] != (exists ? 1 : 0))
      chosen_.fail(fmt::format("layer {} index {}: valid is {}", handle.layer(), indices[i], valid[i]));
    const PlainRow plain = exists ? planes.decode(page.row, item, indices[i]) : PlainRow{std::vector<float>(width), {}};
    for (int c = 0; c < width; ++c) {
      const float got = from_bf16(out[i * width + c]);
      const float expected = from_bf16(to_bf16(plain.values[c]));
      if (got != expected)
        chosen_.fail(fmt::format("layer {} index {} channel {}: gathered {}, stored {}", handle.layer(), indices[i], c,
                                 got, expected));
    }
    ++chosen_.rows;
  }
}

}  // namespace

std::vector<Check> check_gathers(Scenario& scenario) {
  std::vector<Item> items;
  for (const Actor* actor : scenario.live())
    items.push_back({actor, static_cast<std::int32_t>(items.size()), actor->length});
  GatherCheck check(scenario, std::move(items));
  const CacheSchema& schema = scenario.manager().schema();
  for (const LayerKind kind : {LayerKind::swa, LayerKind::csa, LayerKind::hca}) {
    std::vector<std::size_t> layers;
    for (std::size_t i = 0; i < schema.layers.size(); ++i) {
      if (schema.layers[i].spec.kind == kind && schema.layers[i].spec.group == 0) layers.push_back(i);
    }
    const std::size_t count = std::min<std::size_t>(kLayersPerKind, layers.size());
    for (std::size_t i = 0; i < count; ++i) check.check_layer(i == 0 ? layers.front() : layers.back());
  }
  return check.checks();
}

}  // namespace kv4::checks
