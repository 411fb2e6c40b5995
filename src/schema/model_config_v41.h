// DeepSeek-V4.1: layers that share entries and index lists. Its config, checks, preset and schedule.
#pragma once

#include <string>
#include <vector>

#include "kv4/model_config.h"
#include "schema/config_fields.h"

namespace kv4 {

/// `f`: the object with the text model's fields, in Hugging Face's spelling or that of DeepSeek's own config.json.
ModelConfig read_v41(const Fields& f);
/// V4.1's part of validate(); for other models it checks that no layer shares entries.
void validate_sharing(const ModelConfig& config);
ModelConfig v41_flash_preset();

/// The backbone's layers of a valid V4.1 config.
std::vector<LayerSpec> shared_schedule(const ModelConfig& config);

}  // namespace kv4
