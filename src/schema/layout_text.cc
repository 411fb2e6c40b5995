#include "schema/layout_text.h"

#include <algorithm>
#include <sstream>

#include "base/check.h"

namespace kv4 {

namespace {

/// Reads words and values; a missing one makes the stream bad.
struct Words {
  std::istringstream in;

  explicit Words(const std::string& text) : in(text) { in >> std::boolalpha; }
  Words& word(const char* expected) {
    std::string found;
    if (!(in >> found) || found != expected) in.setstate(std::ios::failbit);
    return *this;
  }
  template <class T>
  Words& value(T& out) {
    in >> out;
    return *this;
  }
  std::string name() {
    std::string out;
    in >> out;
    return out;
  }
  void rope(RopeSpec& r) { in >> r.theta >> r.yarn >> r.factor >> r.original_length >> r.beta_fast >> r.beta_slow; }
};

/// " [ratio overlap width]" of one row kind.
struct KindText {
  int ratio = 0, width = 0;
  bool overlap = false;
};

struct LayerText {
  int layer = 0, group = 0;
  std::vector<KindText> kinds;
};

constexpr std::size_t kMaxShownBytes = 200;  // of a line: a layout may come from anybody

std::string shown(const std::string& line) { return line.substr(0, kMaxShownBytes); }

LayerText read_layer(const std::string& line) {
  std::string spaced = line;
  std::replace_if(
      spaced.begin(), spaced.end(), [](char c) { return c == '[' || c == ']'; }, ' ');
  Words words(spaced);
  LayerText out;
  words.word("layer").value(out.layer).word("group").value(out.group);
  require(!words.in.fail() && out.layer >= 0 && out.layer < 4096 && out.group >= 0, ErrorCode::bad_file,
          "the layout has a line '{}'", shown(line));
  for (KindText kind; words.in >> kind.ratio >> kind.overlap >> kind.width;) out.kinds.push_back(kind);
  return out;
}

LayerKind kind_of(const LayerText& layer, ModelConfig& config) {
  if (layer.kinds.empty()) return LayerKind::swa;
  const bool csa = layer.kinds[0].overlap;
  (csa ? config.csa_ratio : config.hca_ratio) = layer.kinds[0].ratio;
  return csa ? LayerKind::csa : LayerKind::hca;
}

}  // namespace

CacheSchema parse_layout(const std::string& text, std::int64_t max_context) {
  ModelConfig config;
  CacheOptions options;
  std::istringstream lines(text);
  std::string line;
  const auto next = [&] { return Words(std::getline(lines, line) ? line : ""); };
  const auto check = [&](const Words& words) {
    require(!words.in.fail(), ErrorCode::bad_file, "the layout has a line '{}'", shown(line));
  };

  int version = 0;
  Words title = next();
  check(title.word("kv4").word("image").value(version));
  require(title.name().empty(), ErrorCode::bad_file, "the layout has a line '{}'; this version reads layouts of V4",
          shown(line));
  Words sizes = next();
  sizes.word("head").value(config.head_dim).word("rope").value(config.rope_dim).word("window").value(config.window);
  check(sizes.word("index").value(config.index_dim).word("eps").value(config.rms_eps));
  Words ropes = next();
  ropes.word("ropes").rope(config.rope_main);
  ropes.word("/").rope(config.rope_compress);
  check(ropes);
  Words formats = next();
  const std::string rows = formats.word("rows").name(), keys = formats.word("keys").name();
  formats.word("hadamard").value(options.hadamard).word("global").value(options.index_global_scale);
  const std::string pending = formats.word("pending").name();
  check(formats.word("block").value(options.block_tokens));
  const std::size_t slash = std::min(rows.find('/'), rows.size());  // window rows / entries, where they differ
  options.window_format = parse_format(shown(rows.substr(0, slash)));
  options.entry_format = parse_format(shown(slash < rows.size() ? rows.substr(slash + 1) : rows));
  options.index_format = parse_format(shown(keys));
  options.pending_dtype = pending == to_string(DType::bf16) ? DType::bf16 : DType::f32;

  while (std::getline(lines, line)) {
    const LayerText layer = read_layer(line);
    options.layers.push_back(layer.layer);
    options.draft_layers = std::max(options.draft_layers, layer.group);
    // Draft stages follow the backbone, of which this cache may own a part.
    const int backbone = layer.group > 0 ? layer.layer - layer.group + 1 : layer.layer + 1;
    config.kinds.resize(std::max({config.num_layers, backbone, 0}), LayerKind::swa);
    config.num_layers = static_cast<int>(config.kinds.size());
    if (layer.group == 0) config.kinds[layer.layer] = kind_of(layer, config);
  }
  config.num_query_heads = config.index_heads = config.index_topk = 1;
  options.max_requests = 1;
  options.max_context = config.max_positions = std::max<std::int64_t>(max_context, 1);
  options.num_blocks = 1;
  CacheSchema schema = build_schema(config, options);
  const std::string written = describe_layout(schema);
  if (written == text) return schema;
  std::istringstream there(text), here(written);
  std::string expected;
  do {
    if (!std::getline(there, line)) line.clear();
    if (!std::getline(here, expected)) expected.clear();
  } while (line == expected && (there || here));
  fail(ErrorCode::bad_file, "the layout is not one of this version: '{}' where '{}' is written", shown(line), expected);
}

}  // namespace kv4
