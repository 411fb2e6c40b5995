// A Prompt that owns its memory, and block keys as bytes.
#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <string_view>
#include <vector>

#include "kv4/prefix_cache.h"

namespace kv4::python {

namespace nb = nanobind;

struct PromptData {
  std::vector<std::int32_t> token_ids;
  TenantId tenant = 0;
  std::string salt;
  std::vector<std::string> extra;
};

/// The library's view of a PromptData, during a call.
class PromptView {
 public:
  explicit PromptView(const PromptData& data) : extra_(data.extra.begin(), data.extra.end()) {
    prompt_ = {data.token_ids, data.tenant, data.salt, extra_};
  }
  PromptView(const PromptView&) = delete;
  const Prompt& prompt() const { return prompt_; }

 private:
  std::vector<std::string_view> extra_;
  Prompt prompt_;
};

/// From a str (as UTF-8) or bytes.
std::string text_of(nb::handle text, const char* name);

BlockKey block_key_of(const nb::bytes& bytes);
nb::bytes bytes_of(const BlockKey& key);
nb::typed<nb::list, nb::bytes> bytes_of(const std::vector<BlockKey>& keys);

}  // namespace kv4::python
