// Tiers, keys and the prefix cache through kv4.h.
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <limits>
#include <thread>

#include "c_api/small_cache.h"

namespace kv4::test::c_api {
namespace {

constexpr std::int64_t kSoonMs = 60'000;
constexpr std::int32_t kPromptTokens = 260;  // two full blocks

struct Folder {
  std::string path = (std::filesystem::temp_directory_path() / "kv4_c_tiers_XXXXXX").string();
  Folder() { EXPECT_NE(mkdtemp(path.data()), nullptr); }
  ~Folder() { std::filesystem::remove_all(path); }
};

kv4_cache_key key_of(unsigned char first) {
  kv4_cache_key key;
  std::memset(key.bytes, first, sizeof(key.bytes));
  return key;
}

/// A cache, the tiers below it, and the prefix that joins them.
class CTiers : public CApi {
 protected:
  CTiers() {
    kv4_tiers_options_init(&tiers_options, sizeof(kv4_tiers_options));
    tiers_options.host_bytes = 64 << 20;
    kv4_tiered_options_init(&tiered_options, sizeof(kv4_tiered_options));
    tiered_options.load_bytes = tiered_options.save_bytes = 4 << 20;
    kv4_prompt_init(&prompt, sizeof(kv4_prompt));
    prompt.token_ids = ids.data();
    prompt.num_tokens = kPromptTokens;
    kv4_admission_init(&admission, sizeof(kv4_admission));
  }
  ~CTiers() override { close(); }

  void open_all() {
    ASSERT_NO_FATAL_FAILURE(open());
    ASSERT_EQ(kv4_tiers_new(cache, &tiers_options, &tiers), KV4_OK) << kv4_last_error();
    ASSERT_EQ(kv4_tiered_prefix_new(cache, tiers, &tiered_options, &tiered), KV4_OK) << kv4_last_error();
  }
  /// Another cache above the same tiers.
  void open_another_cache() {
    kv4_tiered_prefix_free(tiered);
    tiered = nullptr;
    kv4_cache_free(cache);
    ASSERT_NO_FATAL_FAILURE(open());
    ASSERT_EQ(kv4_tiered_prefix_new(cache, tiers, nullptr, &tiered), KV4_OK) << kv4_last_error();
  }
  void close() {
    kv4_tiered_prefix_free(tiered);
    kv4_tiers_free(tiers);
    kv4_cache_free(cache);
    tiered = nullptr;
    tiers = nullptr;
    cache = nullptr;
  }
  /// Computes the prompt, saves its blocks, and returns the request's image.
  std::vector<unsigned char> compute_and_save() {
    EXPECT_EQ(kv4_tiered_prefix_admit(tiered, &prompt, kSoonMs, nullptr, nullptr, &admission), KV4_OK)
        << kv4_last_error();
    EXPECT_EQ(admission.resume_at, 0);
    forward(admission.request, kPromptTokens);
    const std::vector<unsigned char> cold = image(admission.request);
    EXPECT_EQ(kv4_cache_release(cache, admission.request), KV4_OK);
    EXPECT_EQ(kv4_tiered_prefix_save_all(tiered, kSoonMs, nullptr, nullptr), KV4_OK) << kv4_last_error();
    kv4_flush_status reached = KV4_FLUSH_STATUS_FAILED;
    EXPECT_EQ(kv4_tiers_flush(tiers, kSoonMs, &reached), KV4_OK);
    EXPECT_NE(reached, KV4_FLUSH_STATUS_FAILED);
    return cold;
  }
  std::int64_t usable() {
    EXPECT_EQ(kv4_tiered_prefix_admit(tiered, &prompt, kSoonMs, nullptr, nullptr, &admission), KV4_OK)
        << kv4_last_error();
    EXPECT_EQ(kv4_cache_release(cache, admission.request), KV4_OK);
    return admission.usable_tokens;
  }
  std::vector<kv4_tier_report> reports() {
    std::vector<kv4_tier_report> all(4);
    kv4_tier_report_init(all.data(), sizeof(kv4_tier_report));
    std::int64_t count = 0;
    EXPECT_EQ(kv4_tiers_get_reports(tiers, all.data(), std::ssize(all), &count), KV4_OK) << kv4_last_error();
    all.resize(static_cast<std::size_t>(count));
    return all;
  }

  kv4_tiers_options tiers_options;
  kv4_tiered_options tiered_options;
  kv4_prompt prompt;
  kv4_admission admission;
  kv4_tiers* tiers = nullptr;
  kv4_tiered_prefix* tiered = nullptr;
};

TEST_F(CTiers, AnotherCacheGoesOnWhereOneStopped) {
  const Folder folder;
  const std::string directory = folder.path + "/store";
  tiers_options.directory = directory.c_str();
  tiers_options.segment_bytes = 4 << 20;
  ASSERT_NO_FATAL_FAILURE(open_all());
  const auto cold = compute_and_save();
  ASSERT_NO_FATAL_FAILURE(open_another_cache());
  int calls = 0;
  const kv4_progress count = [](void* user, std::int64_t done, std::int64_t total) -> std::int32_t {
    EXPECT_LE(done, total);
    EXPECT_EQ(total, 2);
    return ++*static_cast<int*>(user) > 0;
  };
  ASSERT_EQ(kv4_tiered_prefix_admit(tiered, &prompt, kSoonMs, count, &calls, &admission), KV4_OK) << kv4_last_error();
  EXPECT_EQ(admission.usable_tokens, 256);
  EXPECT_EQ(admission.resume_at, 256);
  ASSERT_NO_FATAL_FAILURE(forward(admission.request, 4));
  EXPECT_EQ(image(admission.request), cold);
  ASSERT_EQ(kv4_cache_release(cache, admission.request), KV4_OK);
  kv4_tiered_statistics statistics;
  kv4_tiered_statistics_init(&statistics, sizeof(kv4_tiered_statistics));
  ASSERT_EQ(kv4_tiered_prefix_get_statistics(tiered, &statistics), KV4_OK);
  EXPECT_EQ(statistics.loaded_blocks, 2);
  EXPECT_EQ(statistics.loaded_snapshots, 1);
  kv4_cache_statistics figures;
  kv4_cache_statistics_init(&figures, sizeof(kv4_cache_statistics));
  ASSERT_EQ(kv4_cache_get_statistics(cache, &figures), KV4_OK);
  EXPECT_GT(figures.tier_load.sum_seconds + figures.tier_load.sum_ns, 0);

  const std::vector<kv4_tier_report> both = reports();
  ASSERT_EQ(both.size(), 2u);
  EXPECT_STREQ(both[0].name, "host");
  EXPECT_STREQ(both[1].name, "disk");
  EXPECT_STREQ(both[1].protection, "none");
  EXPECT_EQ(both[0].hits, 3);
  EXPECT_EQ(both[1].stored, 4);
  EXPECT_STREQ(both[1].failure, "");
  EXPECT_EQ(both[1].num_failures, 0);

  prompt.salt = {"another tenant", 14};
  EXPECT_EQ(usable(), 0);
  prompt.salt = {nullptr, 0};
  kv4_flush_status reached = KV4_FLUSH_STATUS_FAILED;
  ASSERT_EQ(kv4_tiers_close(tiers, kSoonMs, &reached), KV4_OK);
  EXPECT_EQ(reached, KV4_FLUSH_STATUS_KEPT) << "the worst of host memory and disk";

  // The next process has only the disk.
  close();
  tiers_options.host_bytes = 0;
  ASSERT_NO_FATAL_FAILURE(open_all());
  EXPECT_EQ(usable(), 256);
  ASSERT_EQ(kv4_tiers_close(tiers, kSoonMs, &reached), KV4_OK);
  EXPECT_EQ(reached, KV4_FLUSH_STATUS_DURABLE);
}

TEST_F(CTiers, LoadsBetweenStepsAndWithoutARequest) {
  ASSERT_NO_FATAL_FAILURE(open_all());
  const auto cold = compute_and_save();
  ASSERT_NO_FATAL_FAILURE(open_another_cache());
  kv4_prefix_load* load = nullptr;
  ASSERT_EQ(kv4_tiered_prefix_start_load(tiered, &prompt, kSoonMs, &load), KV4_OK) << kv4_last_error();
  std::int64_t brought = 0, wanted = 0;
  for (std::int32_t done = 0; done == 0; std::this_thread::yield())
    ASSERT_EQ(kv4_prefix_load_advance(load, &done), KV4_OK);
  ASSERT_EQ(kv4_prefix_load_progress(load, &brought, &wanted), KV4_OK);
  EXPECT_EQ(brought, 2);
  EXPECT_EQ(wanted, 2);
  ASSERT_EQ(kv4_prefix_load_admit(load, &admission), KV4_OK) << kv4_last_error();
  kv4_prefix_load_free(load);
  EXPECT_EQ(admission.resume_at, 256);
  ASSERT_NO_FATAL_FAILURE(forward(admission.request, 4));
  EXPECT_EQ(image(admission.request), cold);

  ASSERT_NO_FATAL_FAILURE(open_another_cache());
  ASSERT_EQ(kv4_tiered_prefix_load(tiered, &prompt, kSoonMs, nullptr, nullptr, &brought), KV4_OK);
  EXPECT_EQ(brought, 2);
  for (int i = 0; i < 3; ++i) admit();
  EXPECT_EQ(kv4_tiered_prefix_admit(tiered, &prompt, kSoonMs, nullptr, nullptr, &admission), KV4_SHORT_OF_REQUESTS);
  const kv4_progress stop = [](void*, std::int64_t, std::int64_t) -> std::int32_t { return 0; };
  EXPECT_EQ(kv4_tiered_prefix_save_all(tiered, kSoonMs, stop, nullptr), KV4_STOPPED);
  std::int64_t left = -1;
  EXPECT_EQ(kv4_tiered_prefix_save(tiered, 16, &left), KV4_OK);
  EXPECT_EQ(left, 0);
}

TEST_F(CTiers, KeysDecideWhatCounts) {
  const Folder folder;
  const std::string directory = folder.path + "/store", file = folder.path + "/keys";
  std::ofstream(file) << std::string(64, '1') << "\n" << std::string(64, '2') << "\n";
  std::filesystem::permissions(file, std::filesystem::perms::owner_read);
  kv4_cache_key keys[4] = {};
  std::int64_t count = 0;
  ASSERT_EQ(kv4_read_key_file(file.c_str(), keys, 4, &count), KV4_OK) << kv4_last_error();
  ASSERT_EQ(count, 2);
  EXPECT_EQ(keys[0].bytes[0], 0x11);
  EXPECT_EQ(keys[1].bytes[31], 0x22);
  EXPECT_EQ(kv4_read_key_file(file.c_str(), keys, 1, &count), KV4_BAD_ARGUMENT);
  EXPECT_EQ(count, 2);
  expect_error(kv4_read_key_file("/no/such/file", keys, 4, &count), KV4_BAD_FILE, "/no/such/file");

  tiers_options.host_bytes = 0;
  tiers_options.directory = directory.c_str();
  tiers_options.segment_bytes = 4 << 20;
  tiers_options.keys = keys;
  tiers_options.num_keys = 1;
  ASSERT_NO_FATAL_FAILURE(open_all());
  compute_and_save();
  EXPECT_STREQ(reports()[0].protection, "sealed");
  close();
  const kv4_cache_key other = key_of(3);
  tiers_options.keys = &other;
  ASSERT_NO_FATAL_FAILURE(open_all());
  EXPECT_EQ(usable(), 0);
  while (reports()[0].unauthenticated_records == 0) std::this_thread::yield();  // a report lags a little
  close();
  const kv4_cache_key rotated[] = {other, keys[0]};
  tiers_options.keys = rotated;
  tiers_options.num_keys = 2;
  tiers_options.protection = "authenticated";
  ASSERT_NO_FATAL_FAILURE(open_all());
  EXPECT_EQ(usable(), 256);
  EXPECT_STREQ(reports()[0].protection, "authenticated");
}

TEST_F(CTiers, SessionsHaveKeys) {
  const Folder folder;
  const std::string path = folder.path + "/chat.kv4s";
  ASSERT_NO_FATAL_FAILURE(open());
  const kv4_request request = admit();
  ASSERT_NO_FATAL_FAILURE(forward(request, 20));
  const kv4_cache_key key = key_of(1), other = key_of(2);
  kv4_session_identity identity;
  kv4_session_identity_init(&identity, sizeof(kv4_session_identity));
  identity.weights_id = "w";
  identity.keys = &key;
  identity.num_keys = 1;
  ASSERT_EQ(kv4_cache_save_session_file(cache, request, &identity, path.c_str(), nullptr, nullptr), KV4_OK)
      << kv4_last_error();
  kv4_request restored = KV4_NO_REQUEST;
  identity.keys = &other;
  EXPECT_EQ(kv4_cache_restore_session_file(cache, &identity, path.c_str(), nullptr, nullptr, &restored), KV4_BAD_FILE);
  identity.num_keys = 0;
  EXPECT_EQ(kv4_cache_restore_session_file(cache, &identity, path.c_str(), nullptr, nullptr, &restored), KV4_BAD_FILE);
  EXPECT_EQ(restored, KV4_NO_REQUEST);
  identity.keys = &key;
  identity.num_keys = 1;
  ASSERT_EQ(kv4_cache_restore_session_file(cache, &identity, path.c_str(), nullptr, nullptr, &restored), KV4_OK)
      << kv4_last_error();
  EXPECT_EQ(image(restored), image(request));
  identity.num_keys = 65;
  expect_error(kv4_cache_save_session_file(cache, request, &identity, path.c_str(), nullptr, nullptr), KV4_BAD_ARGUMENT,
               "64 are the most");
}

TEST_F(CTiers, PrefixBlocksAreBytes) {
  ASSERT_NO_FATAL_FAILURE(open());
  ASSERT_EQ(kv4_cache_admit_prompt(cache, &prompt, &admission), KV4_OK);
  ASSERT_NO_FATAL_FAILURE(forward(admission.request, kPromptTokens));
  const auto cold = image(admission.request);
  kv4_block_key keys[2];
  std::int64_t count = 0;
  EXPECT_EQ(kv4_cache_block_keys(cache, &prompt, keys, 1, &count), KV4_BAD_ARGUMENT);
  ASSERT_EQ(kv4_cache_block_keys(cache, &prompt, keys, 2, &count), KV4_OK) << kv4_last_error();
  ASSERT_EQ(count, 2);
  kv4_prefix_block kept;
  kv4_prefix_block_init(&kept, sizeof(kv4_prefix_block));
  std::int32_t found = 0;
  ASSERT_EQ(kv4_cache_find_block(cache, &keys[1], &kept, &found), KV4_OK);
  EXPECT_EQ(found, 1);
  EXPECT_EQ(kept.tokens, 256);
  EXPECT_EQ(kept.has_snapshot, 1);
  kv4_cache_info info;
  kv4_cache_info_init(&info, sizeof(kv4_cache_info));
  ASSERT_EQ(kv4_cache_get_info(cache, &info), KV4_OK);
  std::int64_t snapshot_bytes = 0;
  ASSERT_EQ(kv4_cache_snapshot_bytes(cache, &snapshot_bytes), KV4_OK);
  const auto bytes = static_cast<std::size_t>(info.block_image_bytes);
  std::vector<unsigned char> first(bytes), second(bytes), snapshot(static_cast<std::size_t>(snapshot_bytes));
  ASSERT_EQ(kv4_cache_read_block(cache, &keys[0], first.data(), bytes, &found), KV4_OK) << kv4_last_error();
  ASSERT_EQ(kv4_cache_read_block(cache, &keys[1], second.data(), bytes, &found), KV4_OK);
  ASSERT_EQ(kv4_cache_read_snapshot(cache, &keys[1], snapshot.data(), snapshot.size(), &found), KV4_OK);
  EXPECT_EQ(found, 1);
  EXPECT_EQ(kv4_cache_read_block(cache, &keys[0], first.data(), 5, &found), KV4_BAD_ARGUMENT);

  kv4_cache_free(cache);
  cache = nullptr;
  ASSERT_NO_FATAL_FAILURE(open());
  ASSERT_EQ(kv4_cache_find_block(cache, &keys[1], nullptr, &found), KV4_OK);
  EXPECT_EQ(found, 0);
  const kv4_bytes images[] = {{first.data(), bytes}, {second.data(), bytes}};
  std::int64_t inserted = 0;
  ASSERT_EQ(kv4_cache_insert_blocks(cache, &prompt, images, 2, &inserted), KV4_OK) << kv4_last_error();
  EXPECT_EQ(inserted, 2);
  ASSERT_EQ(kv4_cache_insert_snapshot(cache, &keys[1], {snapshot.data(), snapshot.size()}, &found), KV4_OK);
  EXPECT_EQ(found, 1);
  ASSERT_EQ(kv4_cache_admit_prompt(cache, &prompt, &admission), KV4_OK);
  EXPECT_EQ(admission.resume_at, 256);
  ASSERT_NO_FATAL_FAILURE(forward(admission.request, 4));
  EXPECT_EQ(image(admission.request), cold);
}

TEST_F(CTiers, AFolderTellsOfTiersToo) {
  const Folder folder;
  ASSERT_NO_FATAL_FAILURE(open_all());
  kv4_status_options status_options;
  kv4_status_options_init(&status_options, sizeof(kv4_status_options));
  status_options.interval_ms = 0;
  status_options.tiers = tiers;
  kv4_status_folder* status = nullptr;
  ASSERT_EQ(kv4_status_folder_new(cache, (folder.path + "/status").c_str(), &status_options, &status), KV4_OK)
      << kv4_last_error();
  ASSERT_EQ(kv4_status_folder_publish(status), KV4_OK) << kv4_last_error();
  std::ifstream file(folder.path + "/status/status.json");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  EXPECT_NE(text.find("\"host\""), std::string::npos) << text;
  kv4_status_folder_free(status);
}

}  // namespace
}  // namespace kv4::test::c_api
