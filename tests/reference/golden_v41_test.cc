// Recorded models of V4.1 through the library, and that each check can fail: one damaged value of a recording is found.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "checks/golden_checks.h"
#include "checks/golden_v41_recording.h"
#include "kv4/error.h"
#include "support/device.h"

namespace kv4::test {
namespace {

using checks::GoldenCheck;
using checks::GoldenReport;
using checks::SafeTensors;

std::vector<SafeTensors> load_layers(const std::string& directory) {
  std::vector<std::string> paths;
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    if (entry.path().extension() == ".safetensors" && !entry.path().filename().string().starts_with("codecs41"))
      paths.push_back(entry.path().string());
  std::sort(paths.begin(), paths.end());
  std::vector<SafeTensors> out;
  for (const std::string& path : paths) out.push_back(checks::load_safetensors(path));
  return out;
}

// Names of the failed checks.
std::vector<std::string> failures(const GoldenReport& report) {
  std::vector<std::string> out;
  for (const GoldenCheck& check : report.checks())
    if (!check.ok) out.push_back(check.name);
  return out;
}

void check_directory(const std::string& directory, std::size_t least) {
  if (test_backend()->shared_entries() == nullptr) GTEST_SKIP() << "this backend has no operations of V4.1";
  GoldenReport report;
  checks::check_codecs_v41(checks::load_safetensors(directory + "/codecs41.safetensors"), test_backend(), report);
  checks::check_model_v41(load_layers(directory), test_backend(2), report);
  EXPECT_EQ(failures(report), std::vector<std::string>{});
  EXPECT_GE(report.checks().size(), least);
}

TEST(GoldenV41, OwnVectors) { check_directory(source_path("tests/reference/vectors_v41"), 120); }

TEST(GoldenV41, RecordedVectors) {
  const std::string directory = source_path("../shared/golden41");
  if (!std::filesystem::exists(directory)) GTEST_SKIP() << "no recorded vectors beside the checkout: " << directory;
  check_directory(directory, 90);
}

struct Damage {
  const char* file;
  const char* tensor;
  std::size_t byte;
  const char* found_by;
};

// Little-endian floats: byte 3 has sign and exponent; of bf16, byte 1.
constexpr Damage kDamages[] = {
    {"l1_owner", "swa_kv.codes", 128 * 70 + 3, "l1_owner.latents.window.codes"},
    {"l1_owner", "swa_kv.scales", 4 * 70 + 3, "l1_owner.latents.window.scales"},
    {"l1_owner", "comp_entries.codes", 64 * 20 + 3, "l1_owner.latents.entries.codes"},
    {"l3_owner", "comp_entries.scales", 8 * 20 + 3, "l3_owner.latents.entries.scales"},
    {"l3_owner", "idx_keys.codes", 32 * 20 + 3, "l3_owner.latents.keys.codes"},
    {"l1_owner", "idx_keys.scales", 2 * 20 + 1, "l1_owner.latents.keys.scales"},
    {"l1_owner", "comp_latent", 2 * 128 * 20 + 1, "l1_owner.projections.latents.steps"},
    {"l1_owner", "comp_tail_kv", 4 * 5 + 3, "projections.image.pending_rows"},
    {"l4_candidates", "idx_q.codes", 32 * 20 * 12, "l4_candidates.latents.queries.codes"},
    {"l4_candidates", "idx_scores", 4 * (101 * 16 + 7) + 3, "l4_candidates.latents.scores"},
    {"l4_candidates", "cand_blocks", 17 * 16 + 2, "l4_candidates.latents.candidates"},
    {"l5_masked", "idx_scores", 4 * (101 * 16 + 100) + 3, "l5_masked.latents.scores"},
    {"l6_reader", "attn_out", 4 * (256 * 9 + 17) + 3, "l6_reader.latents.attention"},
    {"draft", "attn_out", 4 * (256 * 9 + 17) + 3, "draft.attention"},
    {"draft", "draft_kv.codes", 128 * 7 + 3, "draft.rows.codes"},
};

TEST(GoldenV41, EveryCheckFindsADamagedValue) {
  if (test_backend()->shared_entries() == nullptr) GTEST_SKIP() << "this backend has no operations of V4.1";
  for (const Damage& damage : kDamages) {
    SCOPED_TRACE(std::string(damage.file) + " " + damage.tensor);
    std::vector<SafeTensors> files = load_layers(source_path("tests/reference/vectors_v41"));
    for (const SafeTensors& file : files) {
      if (file.metadata("name") != damage.file) continue;
      const auto bytes = file.tensor(damage.tensor).bytes;
      ASSERT_LT(damage.byte, bytes.size());
      const_cast<std::byte&>(bytes[damage.byte]) ^= std::byte{1};
    }
    GoldenReport report;
    checks::check_model_v41(files, test_backend(), report);
    const std::vector<std::string> failed = failures(report);
    EXPECT_NE(std::find(failed.begin(), failed.end(), damage.found_by), failed.end())
        << (failed.empty() ? "nothing failed" : "failed instead: " + failed[0]);
  }
}

TEST(GoldenV41, ListsOfOtherEntriesAndWrongPositionsAreRefused) {
  const auto refused = [](const char* name, const char* tensor, std::size_t byte, std::uint8_t value,
                          const std::string& part) {
    std::vector<SafeTensors> files = load_layers(source_path("tests/reference/vectors_v41"));
    for (const SafeTensors& file : files)
      if (file.metadata("name") == name)
        const_cast<std::byte&>(file.tensor(tensor).bytes[byte]) = static_cast<std::byte>(value);
    try {
      checks::load_recording_v41(files);
      ADD_FAILURE() << "accepted: " << tensor;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::bad_file);
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
  };
  refused("l1_owner", "idx_topk", 0, 9, "idx_topk of query 0 holds");
  refused("l2_reader", "query_positions", 4, 0, "positions must ascend within 101 tokens");
  refused("draft", "draft_positions", 4 * 5, 0x7F, "draft_positions[5] is 127");
  std::vector<SafeTensors> files = load_layers(source_path("tests/reference/vectors_v41"));
  files.erase(std::find_if(files.begin(), files.end(),
                           [](const SafeTensors& file) { return file.metadata("name") == "l3_owner"; }));
  EXPECT_THROW(checks::load_recording_v41(files), Error);
  EXPECT_THROW(checks::load_recording_v41({}), Error);
}

}  // namespace
}  // namespace kv4::test
