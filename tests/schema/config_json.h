// Configs as Hugging Face has them, for tests to take apart.
#pragma once

#include <nlohmann/json.hpp>
#include <vector>

namespace kv4::test_config {

using Json = nlohmann::json;

inline std::vector<int> ratios(std::vector<int> first, int pairs, int drafts) {
  for (int i = 0; i < pairs; ++i) first.insert(first.end(), {4, 128});
  first.push_back(4);
  first.insert(first.end(), static_cast<std::size_t>(drafts), 0);
  return first;
}

/// DeepSeek-V4-Flash, the fields the cache reads and a few it does not.
inline Json flash() {
  return {{"model_type", "deepseek_v4"},
          {"architectures", {"DeepseekV4ForCausalLM"}},
          {"hidden_size", 4096},
          {"head_dim", 512},
          {"qk_rope_head_dim", 64},
          {"num_attention_heads", 64},
          {"num_hidden_layers", 43},
          {"num_key_value_heads", 1},
          {"num_nextn_predict_layers", 1},
          {"sliding_window", 128},
          {"index_n_heads", 64},
          {"index_head_dim", 128},
          {"index_topk", 512},
          {"rms_norm_eps", 1e-6},
          {"max_position_embeddings", 1048576},
          {"rope_theta", 10000},
          {"compress_rope_theta", 160000},
          {"rope_scaling",
           {{"type", "yarn"},
            {"factor", 16},
            {"beta_fast", 32},
            {"beta_slow", 1},
            {"original_max_position_embeddings", 65536}}},
          {"compress_ratios", ratios({0, 0}, 20, 1)}};
}

/// The later release: says 1 draft stage and lists 3.
inline Json flash_0731() {
  Json json = flash();
  json["compress_ratios"] = ratios({0, 0}, 20, 3);
  return json;
}

inline Json pro() {
  Json json = flash();
  json["num_attention_heads"] = 128;
  json["num_hidden_layers"] = 61;
  json["index_topk"] = 1024;
  json["compress_ratios"] = ratios({128, 128}, 29, 1);
  return json;
}

/// The shape of transformers' own test model: kinds by name, rates beside them, both ropes in one object.
inline Json tiny() {
  return {{"model_type", "deepseek_v4"},
          {"head_dim", 32},
          {"partial_rotary_factor", 0.25},
          {"num_attention_heads", 4},
          {"num_hidden_layers", 3},
          {"sliding_window", 8},
          {"index_n_heads", 2},
          {"index_head_dim", 16},
          {"index_topk", 2},
          {"rms_norm_eps", 1e-6},
          {"max_position_embeddings", 4096},
          {"layer_types", {"heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"}},
          {"compress_rates", {{"compressed_sparse_attention", 4}, {"heavily_compressed_attention", 8}}},
          {"rope_parameters",
           {{"main", {{"rope_type", "default"}, {"rope_theta", 10000.0}, {"partial_rotary_factor", 0.25}}},
            {"compress", {{"rope_type", "default"}, {"rope_theta", 160000.0}, {"partial_rotary_factor", 0.25}}}}}};
}

}  // namespace kv4::test_config
