// kv4.h with invalid arguments and without memory: a status with a message, no change, and no leak (the sanitizers'
// builds check this).
#include <functional>
#include <limits>
#include <string>

#include "c_api/small_cache.h"
#include "support/refused_memory.h"

namespace kv4::test::c_api {
namespace {

class CArguments : public CApi {
 protected:
  void open_all() {
    ASSERT_NO_FATAL_FAILURE(open());
    kv4_tiers_options_init(&tiers_options, sizeof(kv4_tiers_options));
    tiers_options.host_bytes = 16 << 20;
    kv4_tiered_options_init(&tiered_options, sizeof(kv4_tiered_options));
    tiered_options.load_bytes = tiered_options.save_bytes = 2 << 20;
    ASSERT_EQ(kv4_tiers_new(cache, &tiers_options, &tiers), KV4_OK) << kv4_last_error();
    ASSERT_EQ(kv4_tiered_prefix_new(cache, tiers, &tiered_options, &tiered), KV4_OK) << kv4_last_error();
    kv4_prompt_init(&prompt, sizeof(kv4_prompt));
    prompt.token_ids = ids.data();
    prompt.num_tokens = 260;
    kv4_admission_init(&admission, sizeof(kv4_admission));
    kv4_tier_report_init(&report, sizeof(kv4_tier_report));
  }
  ~CArguments() override {
    kv4_prefix_load_free(load);
    kv4_tiered_prefix_free(tiered);
    kv4_tiers_free(tiers);
  }

  kv4_tiers_options tiers_options;
  kv4_tiered_options tiered_options;
  kv4_prompt prompt;
  kv4_admission admission;
  kv4_tier_report report;
  kv4_tiers* tiers = nullptr;
  kv4_tiered_prefix* tiered = nullptr;
  kv4_prefix_load* load = nullptr;
};

TEST_F(CArguments, NullIsRefusedWithTheArgumentsName) {
  ASSERT_NO_FATAL_FAILURE(open_all());
  const auto refused = [](kv4_status status, const char* words) { expect_error(status, KV4_BAD_ARGUMENT, words); };
  std::int64_t number = 0;
  std::int32_t flag = 0;
  kv4_flush_status reached = KV4_FLUSH_STATUS_FAILED;
  kv4_model* new_model = nullptr;
  refused(kv4_model_preset("v4-flash", nullptr), "out is NULL");
  refused(kv4_model_preset(nullptr, &new_model), "name is NULL");
  refused(kv4_model_parse(nullptr, 5, &new_model), "json is NULL");
  refused(kv4_model_load(nullptr, &new_model), "path is NULL");
  refused(kv4_model_load("/no/such", nullptr), "out is NULL");
  refused(kv4_model_with_layers(model, kKinds, 3, nullptr), "out is NULL");
  refused(kv4_model_with_layers(model, nullptr, 3, &new_model), "kinds is NULL");
  refused(kv4_model_with_layers(model, kKinds, -1, &new_model), "-1 elements");
  refused(kv4_backend_cpu(1, nullptr), "out is NULL");
  refused(kv4_cache_new(model, &options, nullptr, nullptr), "out is NULL");
  refused(kv4_cache_new(nullptr, &options, nullptr, &cache), "model is NULL");
  refused(kv4_preempted_new(cache, 100, nullptr), "out is NULL");
  refused(kv4_cache_prepare_forward(cache, nullptr, 1, 0, nullptr), "out is NULL");
  refused(kv4_cache_commit(cache, nullptr), "step is NULL");
  refused(kv4_tiers_new(nullptr, &tiers_options, &tiers), "cache is NULL");
  refused(kv4_tiers_new(cache, nullptr, &tiers), "options is NULL");
  refused(kv4_tiers_new(cache, &tiers_options, nullptr), "out is NULL");
  refused(kv4_tiers_flush(nullptr, 1, &reached), "tiers is NULL");
  refused(kv4_tiers_flush(tiers, 1, nullptr), "out is NULL");
  refused(kv4_tiers_close(tiers, 1, nullptr), "out is NULL");
  refused(kv4_tiers_get_reports(tiers, &report, 1, nullptr), "count is NULL");
  refused(kv4_tiers_get_reports(tiers, nullptr, 1, &number), "out is NULL");
  refused(kv4_tiered_prefix_new(nullptr, tiers, nullptr, &tiered), "cache is NULL");
  refused(kv4_tiered_prefix_new(cache, nullptr, nullptr, &tiered), "tiers is NULL");
  refused(kv4_tiered_prefix_new(cache, tiers, nullptr, nullptr), "out is NULL");
  refused(kv4_tiered_prefix_admit(nullptr, &prompt, 1, nullptr, nullptr, &admission), "tiered is NULL");
  refused(kv4_tiered_prefix_admit(tiered, nullptr, 1, nullptr, nullptr, &admission), "prompt is NULL");
  refused(kv4_tiered_prefix_admit(tiered, &prompt, 1, nullptr, nullptr, nullptr), "out is NULL");
  refused(kv4_tiered_prefix_load(tiered, &prompt, 1, nullptr, nullptr, nullptr), "brought is NULL");
  refused(kv4_tiered_prefix_start_load(tiered, &prompt, 1, nullptr), "out is NULL");
  refused(kv4_tiered_prefix_save(tiered, 1, nullptr), "left is NULL");
  refused(kv4_tiered_prefix_save(nullptr, 1, &number), "tiered is NULL");
  refused(kv4_tiered_prefix_save_all(nullptr, 1, nullptr, nullptr), "tiered is NULL");
  refused(kv4_tiered_prefix_get_statistics(tiered, nullptr), "out is NULL");
  refused(kv4_prefix_load_advance(nullptr, &flag), "load is NULL");
  refused(kv4_prefix_load_admit(nullptr, &admission), "load is NULL");
  refused(kv4_prefix_load_progress(nullptr, &number, &number), "load is NULL");
  refused(kv4_read_key_file(nullptr, nullptr, 0, &number), "path is NULL");
  refused(kv4_read_key_file("/no/such", nullptr, 0, nullptr), "count is NULL");
  refused(kv4_cache_block_keys(cache, nullptr, nullptr, 0, &number), "prompt is NULL");
  refused(kv4_cache_find_block(cache, nullptr, nullptr, &flag), "key is NULL");
  refused(kv4_cache_insert_blocks(cache, &prompt, nullptr, 1, &number), "blocks is NULL");
  refused(kv4_cache_read_block_events(cache, nullptr, 4, &number), "out is NULL");
  refused(kv4_status_folder_new(cache, nullptr, nullptr, nullptr), "directory is NULL");
  kv4_cache_info info;
  kv4_cache_info_init(&info, sizeof(kv4_cache_info));
  ASSERT_EQ(kv4_cache_get_info(cache, &info), KV4_OK);
  EXPECT_EQ(info.num_requests, 0);

  for (const auto& init : {std::function<void()>([] { kv4_tiers_options_init(nullptr, sizeof(kv4_tiers_options)); }),
                           std::function<void()>([] { kv4_step_init(nullptr, sizeof(kv4_step)); }),
                           std::function<void()>([] { kv4_step_item_init(nullptr, sizeof(kv4_step_item)); }),
                           std::function<void()>([] { kv4_tier_report_init(nullptr, sizeof(kv4_tier_report)); }),
                           std::function<void()>([] { kv4_tiered_options_init(nullptr, sizeof(kv4_tiered_options)); }),
                           std::function<void()>([] { kv4_status_options_init(nullptr, sizeof(kv4_status_options)); })})
    init();
  kv4_tiers_free(nullptr);
  kv4_tiered_prefix_free(nullptr);
  kv4_prefix_load_free(nullptr);
}

TEST_F(CArguments, SizesThatNoVersionHas) {
  ASSERT_NO_FATAL_FAILURE(open_all());
  for (const std::size_t size : {std::size_t{0}, std::size_t{8}, std::size_t{17}, sizeof(kv4_tiers_options) - 4,
                                 std::size_t{65544}, std::numeric_limits<std::size_t>::max() - 7}) {
    SCOPED_TRACE(size);
    const std::string words = "size is " + std::to_string(size) + ", which no version has";
    kv4_tiers_options wrong = tiers_options;
    wrong.size = size;
    kv4_tiers* none = nullptr;
    expect_error(kv4_tiers_new(cache, &wrong, &none), KV4_BAD_ARGUMENT, words.c_str());
    EXPECT_EQ(none, nullptr);
    kv4_admission begun = admission;
    begun.size = size;
    expect_error(kv4_tiered_prefix_admit(tiered, &prompt, 1, nullptr, nullptr, &begun), KV4_BAD_ARGUMENT,
                 words.c_str());
    kv4_step step;
    kv4_step_init(&step, sizeof(kv4_step));
    step.size = size;
    expect_error(kv4_cache_commit(cache, &step), KV4_BAD_ARGUMENT, words.c_str());
    kv4_tier_report one = report;
    one.size = size;
    std::int64_t count = 0;
    expect_error(kv4_tiers_get_reports(tiers, &one, 1, &count), KV4_BAD_ARGUMENT, words.c_str());
    kv4_block_event event;
    event.size = size;
    expect_error(kv4_cache_read_block_events(cache, &event, 1, &count), KV4_BAD_ARGUMENT, words.c_str());
  }
  kv4_cache_info info;
  kv4_cache_info_init(&info, sizeof(kv4_cache_info));
  ASSERT_EQ(kv4_cache_get_info(cache, &info), KV4_OK);
  EXPECT_EQ(info.num_requests, 0) << "refused before a request began";
}

// The caller's size of a struct counts, not the library's.
TEST_F(CArguments, InitWritesWhatTheCallerHas) {
  for (const std::size_t size : {offsetof(kv4_cache_options, hadamard), sizeof(kv4_cache_options) + 64}) {
    std::vector<unsigned char> memory(size + 64, 0xa5);
    auto* const mine = reinterpret_cast<kv4_cache_options*>(memory.data());
    kv4_cache_options_init(mine, size);
    EXPECT_EQ(mine->size, size);
    EXPECT_STREQ(mine->arrangement, "block_major");
    for (std::size_t i = sizeof(kv4_cache_options); i < size; ++i) EXPECT_EQ(memory[i], 0) << i;
    for (std::size_t i = size; i < memory.size(); ++i) EXPECT_EQ(memory[i], 0xa5) << i;
    kv4_memory_plan plan;
    kv4_memory_plan_init(&plan, sizeof(plan));
    EXPECT_EQ(kv4_model_plan_memory(model, mine, &plan), KV4_OK) << kv4_last_error();
  }
  for (const std::size_t size : {std::size_t{8}, std::size_t{20}, std::numeric_limits<std::size_t>::max()}) {
    kv4_admission none = {77, 1, 2, 3};
    kv4_admission_init(&none, size);
    EXPECT_EQ(none.size, 0u) << size;
    EXPECT_EQ(none.resume_at, 3) << size;
  }
}

TEST_F(CArguments, CallersOfOtherVersions) {
  ASSERT_NO_FATAL_FAILURE(open_all());
  // An older caller, which knows the first fields: host memory, and defaults for the others.
  kv4_tiers_options older = tiers_options;
  older.size = offsetof(kv4_tiers_options, servers);
  older.num_servers = 77;  // after its end
  kv4_tiers* other = nullptr;
  ASSERT_EQ(kv4_tiers_new(cache, &older, &other), KV4_OK) << kv4_last_error();
  kv4_tiers_free(other);
  // A newer caller: fields that this library does not know must be unset.
  struct Newer {
    kv4_tiers_options known;
    std::int64_t unknown;
  } newer = {tiers_options, 0};
  newer.known.size = sizeof(newer);
  other = nullptr;
  ASSERT_EQ(kv4_tiers_new(cache, &newer.known, &other), KV4_OK) << kv4_last_error();
  kv4_tiers_free(other);
  newer.unknown = 1;
  expect_error(kv4_tiers_new(cache, &newer.known, &other), KV4_BAD_ARGUMENT, "link a newer one");

  // The first element's size applies to the whole array.
  struct LongItem {
    kv4_step_item known;
    std::int64_t unknown;
  } items[2] = {};
  const kv4_request requests[] = {admit(), admit()};
  for (int i = 0; i < 2; ++i) {
    kv4_step_item_init(&items[i].known, sizeof(kv4_step_item));
    items[i].known = {sizeof(LongItem), requests[i], 1, ids.data(), -1};
  }
  kv4_step step;
  kv4_step_init(&step, sizeof(kv4_step));
  ASSERT_EQ(kv4_cache_prepare_forward(cache, &items[0].known, 2, 0, &step), KV4_OK) << kv4_last_error();
  EXPECT_EQ(step.num_tokens, 2);
  ASSERT_EQ(kv4_cache_abort(cache, &step), KV4_OK);
  items[1].known.size = sizeof(kv4_step_item);
  expect_error(kv4_cache_prepare_forward(cache, &items[0].known, 2, 0, &step), KV4_BAD_ARGUMENT, "items[1].size");

  struct ShortReport {
    std::size_t size;
    const char* name;
    const char* protection;
  } reports[2] = {{sizeof(ShortReport), nullptr, nullptr}, {}};
  std::int64_t count = 0;
  ASSERT_EQ(kv4_tiers_get_reports(tiers, reinterpret_cast<kv4_tier_report*>(reports), 2, &count), KV4_OK);
  EXPECT_EQ(count, 1);
  EXPECT_STREQ(reports[0].name, "host");
  EXPECT_EQ(reports[1].size, 0u);
}

TEST_F(CArguments, NamesNumbersAndPaths) {
  ASSERT_NO_FATAL_FAILURE(open_all());
  const std::string too_long(100'000, 'x');
  const char* const long_text = too_long.c_str();
  const auto refused = [](kv4_status status, const char* words) { expect_error(status, KV4_BAD_ARGUMENT, words); };
  kv4_model* no_model = nullptr;
  kv4_tiers* no_tiers = nullptr;
  std::int64_t number = 0;
  kv4_flush_status reached = KV4_FLUSH_STATUS_FAILED;
  refused(kv4_model_preset(long_text, &no_model), "name does not end within 4096 bytes");
  refused(kv4_read_key_file(long_text, nullptr, 0, &number), "path does not end");
  refused(kv4_cache_set_weights_id(cache, long_text), "weights_id does not end");
  kv4_cache_options bad_cache = options;
  bad_cache.eviction = long_text;
  kv4_memory_plan plan;
  kv4_memory_plan_init(&plan, sizeof(kv4_memory_plan));
  refused(kv4_model_plan_memory(model, &bad_cache, &plan), "eviction does not end");
  bad_cache = options;
  bad_cache.eviction = "s3_fifo";
  refused(kv4_model_plan_memory(model, &bad_cache, &plan), "'s3_fifo' is unknown; use one of: lru, s3fifo, density");
  bad_cache = options;
  bad_cache.pending_dtype = "i32";
  refused(kv4_model_plan_memory(model, &bad_cache, &plan), "'i32' is unknown; use one of: f32, bf16");

  const auto with = [&](auto&& change) {
    kv4_tiers_options bad = tiers_options;
    change(bad);
    return kv4_tiers_new(cache, &bad, &no_tiers);
  };
  refused(with([&](auto& o) { o.directory = long_text; }), "directory does not end");
  refused(with([&](auto& o) { o.directory = nullptr; }), "directory is NULL");
  refused(with([&](auto& o) { o.protection = "locked"; }), "use one of: none, sealed, authenticated");
  refused(with([&](auto& o) { o.num_servers = 1; }), "servers is NULL");
  refused(with([&](auto& o) { o.num_servers = -1; }), "-1 elements");
  refused(with([&](auto& o) { o.num_keys = 1; }), "keys is NULL");
  refused(with([&](auto& o) { o.num_keys = 1 << 20; }), "64 are the most");
  refused(with([&](auto& o) { o.remote_ttl_ms = -1; }), "remote_ttl_ms is -1");
  refused(with([&](auto& o) { o.close_limit_ms = std::numeric_limits<std::int64_t>::max(); }), "close_limit_ms is");
  refused(with([&](auto& o) { o.host_bytes = 0; }), "no tier is asked for");
  const char* const servers[] = {"nowhere"};
  EXPECT_LT(with([&](auto& o) {
              o.servers = servers;
              o.num_servers = 1;
            }),
            0);
  EXPECT_EQ(no_tiers, nullptr);
  for (const std::int64_t timeout : {std::int64_t{-1}, std::numeric_limits<std::int64_t>::max()}) {
    refused(kv4_tiers_flush(tiers, timeout, &reached), "timeout_ms is");
    refused(kv4_tiered_prefix_admit(tiered, &prompt, timeout, nullptr, nullptr, &admission), "timeout_ms is");
  }
  refused(kv4_tiered_prefix_save(tiered, -1, &number), "max_records is -1");
  prompt.num_tokens = -1;
  refused(kv4_tiered_prefix_admit(tiered, &prompt, 1, nullptr, nullptr, &admission), "-1 elements");
  prompt.num_tokens = std::numeric_limits<std::int64_t>::max();
  refused(kv4_tiered_prefix_admit(tiered, &prompt, 1, nullptr, nullptr, &admission), "elements");
}

/// Refuses each allocation of the call in turn: it returns OK or out of memory, and finally works.
void refuse_in_turn(const char* name, const std::function<kv4_status()>& call, const std::function<void()>& undo) {
  SCOPED_TRACE(name);
  for (std::int64_t n = 1;; n = next_allocation(n)) {
    kv4_status status = KV4_OK;
    bool happened = false;
    {
      const RefusedMemory memory(n, Refused::one, Threads::own);
      status = call();
      happened = memory.happened();
    }
    if (status == KV4_OK) {
      undo();
      if (!happened) return;
      continue;
    }
    ASSERT_EQ(status, KV4_OUT_OF_MEMORY) << kv4_last_error() << ", allocation " << n;
  }
}

TEST_F(CArguments, RefusedMemoryIsAStatus) {
  ASSERT_NO_FATAL_FAILURE(open_all());
  ASSERT_EQ(kv4_tiered_prefix_admit(tiered, &prompt, 1000, nullptr, nullptr, &admission), KV4_OK);
  ASSERT_NO_FATAL_FAILURE(forward(admission.request, 260));
  ASSERT_EQ(kv4_cache_release(cache, admission.request), KV4_OK);
  ASSERT_EQ(kv4_tiered_prefix_save_all(tiered, 60'000, nullptr, nullptr), KV4_OK);

  kv4_model* new_model = nullptr;
  refuse_in_turn(
      "model", [&] { return kv4_model_preset("v4-flash", &new_model); },
      [&] { kv4_model_free(std::exchange(new_model, nullptr)); });
  kv4_tiers* new_tiers = nullptr;
  refuse_in_turn(
      "tiers", [&] { return kv4_tiers_new(cache, &tiers_options, &new_tiers); },
      [&] { kv4_tiers_free(std::exchange(new_tiers, nullptr)); });
  kv4_tiered_prefix* new_tiered = nullptr;
  refuse_in_turn(
      "tiered", [&] { return kv4_tiered_prefix_new(cache, tiers, &tiered_options, &new_tiered); },
      [&] { kv4_tiered_prefix_free(std::exchange(new_tiered, nullptr)); });
  refuse_in_turn(
      "admit", [&] { return kv4_tiered_prefix_admit(tiered, &prompt, 60'000, nullptr, nullptr, &admission); },
      [&] { EXPECT_EQ(kv4_cache_release(cache, admission.request), KV4_OK); });
  refuse_in_turn(
      "start_load", [&] { return kv4_tiered_prefix_start_load(tiered, &prompt, 60'000, &load); },
      [&] { kv4_prefix_load_free(std::exchange(load, nullptr)); });
  std::int64_t count = 0;
  refuse_in_turn(
      "reports", [&] { return kv4_tiers_get_reports(tiers, &report, 1, &count); },
      [&] { EXPECT_STREQ(report.name, "host"); });
  std::vector<kv4_block_key> keys(2);
  refuse_in_turn(
      "keys", [&] { return kv4_cache_block_keys(cache, &prompt, keys.data(), 2, &count); },
      [&] { EXPECT_EQ(count, 2); });
  refuse_in_turn(
      "weights", [&] { return kv4_cache_set_weights_id(cache, "another name, too long for a small string"); },
      [&] { EXPECT_EQ(kv4_cache_set_weights_id(cache, "w"), KV4_OK); });
  kv4_cache_info info;
  kv4_cache_info_init(&info, sizeof(kv4_cache_info));
  ASSERT_EQ(kv4_cache_get_info(cache, &info), KV4_OK);
  EXPECT_EQ(info.num_requests, 0);
}

}  // namespace
}  // namespace kv4::test::c_api
