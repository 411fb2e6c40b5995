// A store of chunks through kv4_chunks.h.
#include <gtest/gtest.h>
#include <poll.h>
#include <stdlib.h>

#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "kv4_chunks.h"

namespace kv4::test::c_api {
namespace {

constexpr std::int64_t kSoonMs = 60'000;

kv4_bytes text(const char* value) { return {value, std::strlen(value)}; }

class CChunks : public testing::Test {
 protected:
  CChunks() {
    kv4_tiers_options_init(&tiers, sizeof tiers);
    tiers.host_bytes = 8 << 20;
    kv4_chunk_store_options_init(&options, sizeof options);
    options.tiers = &tiers;
  }
  ~CChunks() override {
    kv4_chunk_store_free(store);
    if (!folder.empty()) std::filesystem::remove_all(folder);
  }
  void open() { ASSERT_EQ(kv4_chunk_store_new(&options, &store), KV4_OK) << kv4_last_error(); }
  void on_disk() {
    folder = (std::filesystem::temp_directory_path() / "kv4_c_chunks_XXXXXX").string();
    ASSERT_NE(mkdtemp(folder.data()), nullptr);
    directory = folder + "/store";
    tiers.directory = directory.c_str();
    tiers.segment_bytes = 1 << 20;
    tiers.disk_bytes = 16 << 20;
  }
  /// The statuses of a batch, and in `sizes` its bytes.
  std::vector<int> end_of(std::uint64_t batch) {
    kv4_chunk_results* results = nullptr;
    EXPECT_EQ(kv4_chunk_store_take(store, batch, kSoonMs, &results), KV4_OK) << kv4_last_error();
    kv4_chunk_results_view view;
    kv4_chunk_results_view_init(&view, sizeof view);
    EXPECT_EQ(kv4_chunk_results_get_view(results, &view), KV4_OK);
    EXPECT_EQ(view.batch, batch);
    sizes.assign(view.bytes, view.bytes + view.count);
    flushed.assign(view.flushed, view.flushed + view.num_flushed);
    std::vector<int> statuses(view.statuses, view.statuses + view.count);
    kv4_chunk_results_free(results);
    return statuses;
  }

  kv4_tiers_options tiers;
  kv4_chunk_store_options options;
  kv4_chunk_store* store = nullptr;
  std::string folder, directory;
  std::vector<std::int64_t> sizes;
  std::vector<int> flushed;
};

TEST_F(CChunks, GoThroughAStore) {
  ASSERT_NO_FATAL_FAILURE(on_disk());
  options.space = text("a model");
  ASSERT_NO_FATAL_FAILURE(open());
  std::int32_t fd = -1;
  ASSERT_EQ(kv4_chunk_store_event_fd(store, &fd), KV4_OK);
  const kv4_bytes keys[] = {text("one"), text("two"), text("three")};
  std::vector<char> zeros(100'000);
  zeros[7] = 'x';
  const kv4_bytes values[] = {text("first"), text("se"), text("cond"), {zeros.data(), zeros.size()}};
  const std::int64_t pieces[] = {1, 2, 1};
  std::uint64_t batch = 0;
  ASSERT_EQ(kv4_chunk_store_put(store, keys, values, pieces, 3, nullptr, &batch), KV4_OK) << kv4_last_error();
  pollfd wait{fd, POLLIN, 0};
  EXPECT_EQ(::poll(&wait, 1, 60'000), 1);
  EXPECT_EQ(end_of(batch), (std::vector<int>{0, 0, 0}));
  EXPECT_EQ(::poll(&wait, 1, 0), 0);
  ASSERT_EQ(kv4_chunk_store_flush(store, nullptr, &batch), KV4_OK);
  (void)end_of(batch);
  EXPECT_EQ(flushed, (std::vector<int>{KV4_FLUSH_STATUS_KEPT, KV4_FLUSH_STATUS_DURABLE}));

  std::int32_t known[3] = {};
  const kv4_bytes some[] = {text("one"), text("none"), text("two")};
  ASSERT_EQ(kv4_chunk_store_look_up(store, some, 3, 0, known), KV4_OK);
  EXPECT_EQ(known[0], KV4_CHUNK_PRESENCE_THERE);
  EXPECT_EQ(known[1], KV4_CHUNK_PRESENCE_ABSENT);

  kv4_flush_status reached = KV4_FLUSH_STATUS_FAILED;
  ASSERT_EQ(kv4_chunk_store_close(store, kSoonMs, &reached), KV4_OK);
  EXPECT_EQ(reached, KV4_FLUSH_STATUS_KEPT);
  kv4_chunk_store_free(store);
  store = nullptr;
  ASSERT_NO_FATAL_FAILURE(open());
  std::vector<char> memory(200'000, 'm');
  std::uint64_t region = 0;
  ASSERT_EQ(kv4_chunk_store_add_memory(store, {memory.data(), memory.size()}, &region), KV4_OK);
  char left[3] = {}, right[10] = {}, small[2] = {};
  const kv4_bytes wanted[] = {text("three"), text("two"), text("none"), text("one")};
  const kv4_memory to[] = {{memory.data(), 150'000}, {left, 3}, {right, 10}, {right, 1}, {small, 2}};
  const std::int64_t places[] = {1, 2, 1, 1};
  ASSERT_EQ(kv4_chunk_store_get(store, wanted, to, places, 4, nullptr, &batch), KV4_OK) << kv4_last_error();
  EXPECT_EQ(end_of(batch), (std::vector<int>{KV4_CHUNK_STATUS_OK, KV4_CHUNK_STATUS_OK, KV4_CHUNK_STATUS_MISSING,
                                             KV4_CHUNK_STATUS_TOO_SMALL}));
  EXPECT_EQ(sizes, (std::vector<std::int64_t>{100'000, 6, 0, 5}));
  EXPECT_TRUE(std::equal(zeros.begin(), zeros.end(), memory.begin()));
  EXPECT_EQ(std::string(left, 3) + right, "second");
  std::int32_t removed = 0;
  EXPECT_EQ(kv4_chunk_store_remove_memory(store, region, &removed), KV4_OK);
  EXPECT_EQ(removed, 1);

  kv4_chunk_call call;
  kv4_chunk_call_init(&call, sizeof call);
  call.tenant = 5;
  ASSERT_EQ(kv4_chunk_store_exists(store, keys, 2, &call, &batch), KV4_OK);
  EXPECT_EQ(end_of(batch), (std::vector<int>{1, 1}));
  ASSERT_EQ(kv4_chunk_store_remove(store, keys, 2, nullptr, &batch), KV4_OK);
  EXPECT_EQ(end_of(batch), (std::vector<int>{0, 0}));
  ASSERT_EQ(kv4_chunk_store_exists(store, keys, 3, nullptr, &batch), KV4_OK);
  kv4_chunk_results* any = nullptr;
  ASSERT_EQ(kv4_chunk_store_take(store, 0, kSoonMs, &any), KV4_OK);
  kv4_chunk_results_free(any);
  EXPECT_EQ(kv4_chunk_store_take(store, 0, 0, &any), KV4_STOPPED);
  EXPECT_EQ(kv4_chunk_store_take(store, batch, 0, &any), KV4_STOPPED);

  kv4_chunk_store_report report;
  kv4_chunk_store_report_init(&report, sizeof report);
  ASSERT_EQ(kv4_chunk_store_get_report(store, &report), KV4_OK);
  EXPECT_EQ(report.gets, 4);
  EXPECT_EQ(report.hits, 2);
  EXPECT_EQ(report.hit_bytes, 100'006);
  kv4_tier_report of_tiers[3];
  kv4_tier_report_init(of_tiers, sizeof *of_tiers);
  std::int64_t count = 0;
  ASSERT_EQ(kv4_chunk_store_get_tier_reports(store, of_tiers, 3, &count), KV4_OK) << kv4_last_error();
  ASSERT_EQ(count, 2);
  EXPECT_STREQ(of_tiers[1].name, "disk");
  EXPECT_EQ(of_tiers[1].hits, 2);
}

TEST_F(CChunks, RefuseBadInput) {
  ASSERT_NO_FATAL_FAILURE(open());
  const kv4_bytes key = text("a"), value = text("value"), empty{nullptr, 0}, null{nullptr, 5};
  std::uint64_t batch = 77;
  EXPECT_EQ(kv4_chunk_store_put(store, &empty, &value, nullptr, 1, nullptr, &batch), KV4_BAD_ARGUMENT);
  EXPECT_EQ(kv4_chunk_store_put(store, &null, &value, nullptr, 1, nullptr, &batch), KV4_BAD_ARGUMENT);
  EXPECT_EQ(kv4_chunk_store_put(store, &key, &null, nullptr, 1, nullptr, &batch), KV4_BAD_ARGUMENT);
  EXPECT_EQ(kv4_chunk_store_put(store, nullptr, &value, nullptr, 1, nullptr, &batch), KV4_BAD_ARGUMENT);
  EXPECT_EQ(kv4_chunk_store_put(store, &key, &value, nullptr, -1, nullptr, &batch), KV4_BAD_ARGUMENT);
  EXPECT_EQ(kv4_chunk_store_put(store, &key, &value, nullptr, 1, nullptr, nullptr), KV4_BAD_ARGUMENT);
  EXPECT_EQ(kv4_chunk_store_put(nullptr, &key, &value, nullptr, 1, nullptr, &batch), KV4_BAD_ARGUMENT);
  for (const std::int64_t pieces : {std::int64_t{-1}, std::int64_t{1025}, std::int64_t{1} << 62}) {
    EXPECT_EQ(kv4_chunk_store_put(store, &key, &value, &pieces, 1, nullptr, &batch), KV4_BAD_ARGUMENT);
  }
  kv4_chunk_call call;
  kv4_chunk_call_init(&call, sizeof call);
  call.timeout_ms = -1;
  EXPECT_EQ(kv4_chunk_store_flush(store, &call, &batch), KV4_BAD_ARGUMENT);
  EXPECT_STREQ(kv4_last_error(), "call.timeout_ms is -1; 0 to 400000000000");
  call.size = 7;
  EXPECT_EQ(kv4_chunk_store_flush(store, &call, &batch), KV4_BAD_ARGUMENT);
  EXPECT_EQ(batch, 77u);
  std::uint64_t region = 0;
  EXPECT_EQ(kv4_chunk_store_add_memory(store, {nullptr, 5}, &region), KV4_BAD_ARGUMENT);
  std::int32_t removed = 1;
  EXPECT_EQ(kv4_chunk_store_remove_memory(store, 3, &removed), KV4_OK);
  EXPECT_EQ(removed, 0);
  kv4_chunk_store* other = nullptr;
  options.tiers = nullptr;
  EXPECT_EQ(kv4_chunk_store_new(&options, &other), KV4_BAD_ARGUMENT);
  EXPECT_EQ(kv4_chunk_store_new(nullptr, &other), KV4_BAD_ARGUMENT);
  options.tiers = &tiers;
  options.max_chunks = 0;
  EXPECT_EQ(kv4_chunk_store_new(&options, &other), KV4_BAD_ARGUMENT);
  EXPECT_EQ(other, nullptr);
  kv4_chunk_store_free(nullptr);
  kv4_chunk_results_free(nullptr);
}

}  // namespace
}  // namespace kv4::test::c_api
