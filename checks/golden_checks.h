// The checks of `kv4 golden`, one call per file.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "golden_report.h"
#include "kv4/backend.h"
#include "kv4/model_config.h"
#include "safetensors.h"

namespace kv4::checks {

struct Recording;
struct Capture;

/// Every number format: the stored bytes equal the recorded ones.
void check_codecs(const SafeTensors& file, const std::shared_ptr<Backend>& backend, GoldenReport& report);

/// One recorded layer: rotation, rows, pending rows, scores, top-k and attention. `name` leads the names of its checks.
void check_layer(const SafeTensors& file, LayerKind kind, const std::string& name,
                 const std::shared_ptr<Backend>& backend, GoldenReport& report);

/// The canonical image of a replay against the recording and the replay's gathers; `prefix` names the replay.
void check_image(const Recording& recording, const Capture& capture, const std::string& prefix, GoldenReport& report);
/// Number of bytes that differ between the pending parts of two images of the same tokens.
std::int64_t differing_pending_bytes(const Capture& a, const Capture& b);

/// The formats of V4.1 and its selection between equal scores: stored bytes, lists and candidates are as recorded.
void check_codecs_v41(const SafeTensors& file, const std::shared_ptr<Backend>& backend, GoldenReport& report);
/// A recorded model of V4.1, all its files: rows, entries and keys from projections and from latents, candidates,
/// lists, attention, drafts.
void check_model_v41(const std::vector<SafeTensors>& files, const std::shared_ptr<Backend>& backend,
                     GoldenReport& report);

}  // namespace kv4::checks
