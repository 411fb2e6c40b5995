// Configs in Hugging Face's form, for tests to modify.
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

/// DeepSeek-V4-Flash: the fields that the cache reads and a few others.
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

/// The later release: states 1 draft stage and lists 3.
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

/// The form of transformers' test model: kinds by name, rates beside them, both ropes in one object.
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

inline std::vector<int> shared_ratios() {
  std::vector<int> out = {0, 0};
  out.insert(out.end(), 18, 2);
  out.insert(out.end(), 20, 1);
  out.insert(out.end(), 3, 0);
  return out;
}

/// DeepSeek-V4.1-Flash, with the text model's fields in an object of their own.
inline Json v41_flash() {
  return {{"model_type", "deepseek_v41"},
          {"architectures", {"DeepseekV41ForCausalLM"}},
          {"text_config",
           {{"model_type", "deepseek_v41_text"},
            {"hidden_size", 5120},
            {"num_hidden_layers", 40},
            {"num_attention_heads", 64},
            {"head_dim", 512},
            {"qk_rope_head_dim", 64},
            {"rms_norm_eps", 1e-20},
            {"max_position_embeddings", 1048576},
            {"rope_theta", 10000},
            {"rope_scaling",
             {{"rope_type", "yarn"},
              {"factor", 16},
              {"beta_fast", 32},
              {"beta_slow", 1},
              {"original_max_position_embeddings", 65536}}},
            {"sliding_window", 128},
            {"compress_ratios", shared_ratios()},
            {"compress_rope_theta", 160000},
            {"kv_source_layer_ids", {2, 8, 14, 20}},
            {"index_source_layer_ids", {2, 8, 14, 20, 24, 28, 32, 36}},
            {"index_n_heads", 32},
            {"index_head_dim", 128},
            {"index_topk", 512},
            {"candidate_source_layer_id", 20},
            {"candidate_topk_blocks", 2048},
            {"candidate_block_size", 8},
            {"engram_layer_ids", {1, 14}},
            {"engram_max_ngram_size", 4},
            {"engram_pad_token_id", 2},
            {"num_nextn_predict_layers", 3},
            {"dspark_block_size", 5},
            {"dspark_target_layer_ids", {37, 38, 39}}}},
          {"vision_config", {{"model_type", "deepseek_v41_vision"}, {"num_hidden_layers", 32}}}};
}

/// The same model in the form of DeepSeek's own inference/config.json.
inline Json v41_own() {
  return {{"n_layers", 40},
          {"n_heads", 64},
          {"head_dim", 512},
          {"rope_head_dim", 64},
          {"window_size", 128},
          {"norm_eps", 1e-20},
          {"compress_ratios", shared_ratios()},
          {"kv_source_layers", {2, 8, 14, 20}},
          {"index_source_layers", {2, 8, 14, 20, 24, 28, 32, 36}},
          {"index_n_heads", 32},
          {"index_head_dim", 128},
          {"index_topk", 512},
          {"candidate_source_layer", 20},
          {"candidate_block_size", 8},
          {"candidate_topk_blocks", 2048},
          {"rope_theta", 10000},
          {"compress_rope_theta", 160000},
          {"rope_factor", 16},
          {"original_seq_len", 65536},
          {"beta_fast", 32},
          {"beta_slow", 1},
          {"n_mtp_layers", 3},
          {"dspark_block_size", 5},
          {"dspark_target_layer_ids", {37, 38, 39}},
          {"engram_layer_ids", {1, 14}},
          {"engram_max_ngram_size", 4},
          {"engram_pad_id", 2}};
}

}  // namespace kv4::test_config
