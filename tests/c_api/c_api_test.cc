// kv4.h: the same bytes as the C++ interface, errors as statuses, structs that may grow.
#include "kv4.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/log.h"
#include "c_api/small_cache.h"
#include "kv4/kv_cache_manager.h"

namespace kv4::test::c_api {
namespace {

// kv4_tensor is DLPack's DLTensor, kv4_managed_tensor its DLManagedTensor.
static_assert(sizeof(kv4_tensor) == 48 && sizeof(kv4_managed_tensor) == 64);
static_assert(offsetof(kv4_tensor, device_type) == 8 && offsetof(kv4_tensor, device_id) == 12);
static_assert(offsetof(kv4_tensor, ndim) == 16 && offsetof(kv4_tensor, dtype_code) == 20);
static_assert(offsetof(kv4_tensor, dtype_bits) == 21 && offsetof(kv4_tensor, dtype_lanes) == 22);
static_assert(offsetof(kv4_tensor, shape) == 24 && offsetof(kv4_tensor, strides) == 32);
static_assert(offsetof(kv4_tensor, byte_offset) == 40 && offsetof(kv4_managed_tensor, deleter) == 56);

TEST_F(CApi, TheBytesOfTheCppInterface) {
  ASSERT_NO_FATAL_FAILURE(open());
  const kv4_request request = admit();
  for (const int count : {200, 57, 1}) ASSERT_NO_FATAL_FAILURE(forward(request, count));

  kv4::ModelConfig config = kv4::model_preset("v4-flash");
  config.kinds = {kv4::LayerKind::swa, kv4::LayerKind::csa, kv4::LayerKind::hca};
  config.num_layers = 3;
  kv4::KVCacheManager manager(config, {});
  manager.bind_weights(1,
                       {{bias.data(), {4, 1024}}, {norm.data(), {512}}, {bias.data(), {4, 256}}, {norm.data(), {128}}});
  manager.bind_weights(2, {{bias.data(), {128, 512}}, {norm.data(), {512}}, {}, {}});
  const kv4::RequestId other = manager.admit().value();
  std::vector<std::int32_t> best(kTopk);
  std::vector<float> attended(kHeads * 512);
  for (const int count : {257, 1}) {
    const std::int64_t at = manager.length(other);
    const kv4::StepItem item{other, count, std::span(ids).subspan(static_cast<std::size_t>(at), count)};
    const kv4::Step step = manager.prepare_forward({&item, 1}).value();
    const kv4::TensorView raw(x.data() + at * 512, {count, 512}), kv(x.data() + at * 1024, {count, 1024}),
        index(x.data() + at * 256, {count, 256});
    manager.acquire(0).append({raw, {}, {}, {}, {}});
    manager.acquire(1).append({raw, kv, kv, index, index});
    manager.acquire(2).append({raw, raw, raw, {}, {}});
    if (count == 1) {
      manager.acquire(1).index_topk({{x.data(), {1, kHeads, 128}}, {}, {x.data(), {1, kHeads}}},
                                    {best.data(), {1, kTopk}});
      manager.acquire(1).attend({.q = {x.data(), {1, kHeads, 512}}, .topk = {best.data(), {1, kTopk}}},
                                {attended.data(), {1, kHeads, 512}});
    }
    manager.commit(step);
  }
  const auto as_chars = [](const std::vector<std::byte>& bytes) {
    const auto* p = reinterpret_cast<const unsigned char*>(bytes.data());
    return std::vector<unsigned char>(p, p + bytes.size());
  };
  EXPECT_EQ(image(request), as_chars(manager.export_image(other).bytes));
  EXPECT_EQ(blocks(request), as_chars(manager.export_blocks(other)));
  EXPECT_EQ(chosen, best);
  EXPECT_EQ(out, attended);
}

TEST_F(CApi, RewindForkPreemptSaveAndImportGoOnAlike) {
  ASSERT_NO_FATAL_FAILURE(open());
  const kv4_request straight = admit();
  ASSERT_NO_FATAL_FAILURE(forward(straight, 290));
  const auto expected = image(straight);

  kv4_request request = admit();
  ASSERT_NO_FATAL_FAILURE(forward(request, 280));
  ASSERT_NO_FATAL_FAILURE(forward(request, 5));
  ASSERT_EQ(kv4_cache_rewind(cache, request, 282, 0), KV4_OK) << kv4_last_error();
  kv4_request branch = KV4_NO_REQUEST;
  ASSERT_EQ(kv4_cache_fork(cache, request, &branch), KV4_OK) << kv4_last_error();
  ASSERT_NO_FATAL_FAILURE(forward(branch, 8));
  EXPECT_EQ(image(branch), expected);
  ASSERT_EQ(kv4_cache_release(cache, branch), KV4_OK);

  std::int64_t bytes = 0;
  kv4_preempted* aside = nullptr;
  ASSERT_EQ(kv4_cache_preempted_bytes(cache, request, &bytes), KV4_OK);
  ASSERT_EQ(kv4_preempted_new(cache, bytes, &aside), KV4_OK) << kv4_last_error();
  ASSERT_EQ(kv4_cache_preempt(cache, request, aside), KV4_OK) << kv4_last_error();
  EXPECT_EQ(kv4_cache_release(cache, request), KV4_BAD_ARGUMENT);
  ASSERT_EQ(kv4_cache_resume(cache, aside, &request), KV4_OK) << kv4_last_error();
  kv4_preempted_free(aside);

  const std::string path = (std::filesystem::temp_directory_path() / "kv4_c_api_test.kv4s").string();
  kv4_session_identity identity;
  kv4_session_identity_init(&identity, sizeof(kv4_session_identity));
  identity.weights_id = "w";
  identity.salt = {"secret", 6};
  int calls = 0;
  const kv4_progress stop = [](void* user, std::int64_t, std::int64_t) -> std::int32_t {
    ++*static_cast<int*>(user);
    return 0;
  };
  EXPECT_EQ(kv4_cache_save_session_file(cache, request, &identity, path.c_str(), stop, &calls), KV4_STOPPED);
  EXPECT_EQ(calls, 1);
  EXPECT_FALSE(std::filesystem::exists(path));
  ASSERT_EQ(kv4_cache_save_session_file(cache, request, &identity, path.c_str(), nullptr, nullptr), KV4_OK);
  kv4_request restored = KV4_NO_REQUEST;
  identity.salt = {"other", 5};
  EXPECT_EQ(kv4_cache_restore_session_file(cache, &identity, path.c_str(), nullptr, nullptr, &restored), KV4_BAD_FILE);
  EXPECT_NE(std::strstr(kv4_last_error(), "salt"), nullptr) << kv4_last_error();
  identity.salt = {"secret", 6};
  ASSERT_EQ(kv4_cache_restore_session_file(cache, &identity, path.c_str(), nullptr, nullptr, &restored), KV4_OK);
  std::filesystem::remove(path);
  ASSERT_NO_FATAL_FAILURE(forward(restored, 8));
  EXPECT_EQ(image(restored), expected);
  ASSERT_EQ(kv4_cache_release(cache, restored), KV4_OK);

  const auto state = image(request), held = blocks(request);
  kv4_cache_info info;
  kv4_cache_info_init(&info, sizeof(kv4_cache_info));
  ASSERT_EQ(kv4_cache_get_info(cache, &info), KV4_OK);
  const std::int64_t length = 282;
  kv4_import import;
  kv4_import_init(&import, sizeof(kv4_import));
  import.layout_id = info.layout_id;
  import.lengths = &length;
  import.num_lengths = 1;
  import.token_ids = ids.data();
  import.num_tokens = length;
  import.image = {state.data(), state.size()};
  import.blocks = {held.data(), held.size()};
  kv4_request imported = KV4_NO_REQUEST;
  ASSERT_EQ(kv4_cache_import_image(cache, &import, &imported), KV4_OK) << kv4_last_error();
  ASSERT_NO_FATAL_FAILURE(forward(imported, 8));
  EXPECT_EQ(image(imported), expected);
}

TEST_F(CApi, PromptsFindWhatIsKept) {
  ASSERT_NO_FATAL_FAILURE(open());
  kv4_prompt prompt;
  kv4_prompt_init(&prompt, sizeof(kv4_prompt));
  prompt.token_ids = ids.data();
  prompt.num_tokens = 260;
  kv4_admission admission;
  kv4_admission_init(&admission, sizeof(kv4_admission));
  ASSERT_EQ(kv4_cache_admit_prompt(cache, &prompt, &admission), KV4_OK) << kv4_last_error();
  EXPECT_EQ(admission.resume_at, 0);
  ASSERT_NO_FATAL_FAILURE(forward(admission.request, 260));
  const auto cold = image(admission.request);
  ASSERT_EQ(kv4_cache_release(cache, admission.request), KV4_OK);

  ASSERT_EQ(kv4_cache_admit_prompt(cache, &prompt, &admission), KV4_OK) << kv4_last_error();
  EXPECT_EQ(admission.usable_tokens, 256);
  EXPECT_EQ(admission.resume_at, 256);
  ASSERT_NO_FATAL_FAILURE(forward(admission.request, 4));
  EXPECT_EQ(image(admission.request), cold);
  ASSERT_EQ(kv4_cache_release(cache, admission.request), KV4_OK);

  prompt.salt = {"another tenant", 14};
  ASSERT_EQ(kv4_cache_admit_prompt(cache, &prompt, &admission), KV4_OK);
  EXPECT_EQ(admission.usable_tokens, 0);

  kv4_prefix_statistics statistics;
  kv4_prefix_statistics_init(&statistics, sizeof(kv4_prefix_statistics));
  ASSERT_EQ(kv4_cache_get_prefix_statistics(cache, &statistics), KV4_OK);
  EXPECT_EQ(statistics.prompts, 3);
  EXPECT_EQ(statistics.hits, 1);
  kv4_cache_statistics all;
  kv4_cache_statistics_init(&all, sizeof(kv4_cache_statistics));
  ASSERT_EQ(kv4_cache_get_statistics(cache, &all), KV4_OK);
  EXPECT_EQ(all.requests, 1);
  EXPECT_EQ(all.blocks, all.free_blocks + all.held_blocks + all.evictable_blocks);
  EXPECT_EQ(std::accumulate(std::begin(all.admit.counts), std::end(all.admit.counts), std::int64_t{0}), 3);
  EXPECT_GT(all.prepare_forward.sum_seconds + all.prepare_forward.sum_ns, 0);
  EXPECT_EQ(all.admit_shortages, 0);
  EXPECT_EQ(kv4_time_histogram_bound(-1), 0);
  EXPECT_EQ(kv4_time_histogram_bound(0), 1e-6);
  EXPECT_EQ(kv4_time_histogram_bound(21), 10);
  EXPECT_EQ(kv4_time_histogram_bound(22), std::numeric_limits<double>::infinity());
  EXPECT_EQ(kv4_cache_get_statistics(nullptr, &all), KV4_BAD_ARGUMENT);
  kv4_block_event events[8];
  kv4_block_event_init(events, sizeof(kv4_block_event));
  std::int64_t count = 0;
  ASSERT_EQ(kv4_cache_read_block_events(cache, events, 8, &count), KV4_OK);
  EXPECT_EQ(count, 4);  // two blocks and two snapshots
  ASSERT_EQ(kv4_cache_invalidate(cache, "w"), KV4_OK);
  prompt.salt = {nullptr, 0};
  ASSERT_EQ(kv4_cache_admit_prompt(cache, &prompt, &admission), KV4_OK);
  EXPECT_EQ(admission.usable_tokens, 0);
}

TEST_F(CApi, ShortagesArePositiveAndChangeNothing) {
  ASSERT_NO_FATAL_FAILURE(open());
  for (int i = 0; i < 3; ++i) admit();
  kv4_request request = 77;
  EXPECT_EQ(kv4_cache_admit(cache, &request), KV4_SHORT_OF_REQUESTS);
  EXPECT_EQ(request, 77);
  EXPECT_STREQ(kv4_status_name(KV4_SHORT_OF_REQUESTS), "KV4_SHORT_OF_REQUESTS");
}

TEST(CApiV41, PlansAndMakesACache) {
  kv4_model* flash = nullptr;
  ASSERT_EQ(kv4_model_preset("v4.1-flash", &flash), KV4_OK) << kv4_last_error();
  kv4_layer_kind kind = KV4_LAYER_KIND_CSA;
  EXPECT_EQ(kv4_model_layer_kind(flash, 1, &kind), KV4_OK);
  EXPECT_EQ(kind, KV4_LAYER_KIND_SWA);
  EXPECT_EQ(kv4_model_layer_kind(flash, 3, &kind), KV4_OK);
  EXPECT_EQ(kind, KV4_LAYER_KIND_SHARED);

  kv4_cache_options options;
  kv4_cache_options_init(&options, sizeof(options));
  EXPECT_STREQ(options.row_format, "");
  EXPECT_STREQ(options.entry_format, "");
  options.max_requests = 1;
  options.max_context = 256;
  kv4_memory_plan plan;
  kv4_memory_plan_init(&plan, sizeof(plan));
  ASSERT_EQ(kv4_model_plan_memory(flash, &options, &plan), KV4_OK) << kv4_last_error();
  EXPECT_EQ(plan.block_bytes, 113920);
  EXPECT_EQ(plan.state_bytes_per_request, 2727936);
  options.row_format = "fp8_tile64";
  options.entry_format = "nvfp4_row";
  ASSERT_EQ(kv4_model_plan_memory(flash, &options, &plan), KV4_OK) << kv4_last_error();
  EXPECT_EQ(plan.block_bytes, 113920);
  EXPECT_GT(plan.state_bytes_per_request, 2727936);
  options.window_format = "fp7";
  EXPECT_EQ(kv4_model_plan_memory(flash, &options, &plan), KV4_BAD_ARGUMENT);
  options.window_format = "";

  kv4_cache* cache = nullptr;
  ASSERT_EQ(kv4_cache_new(flash, &options, nullptr, &cache), KV4_OK) << kv4_last_error();
  kv4_cache_free(cache);
  kv4_model* stack = nullptr;
  EXPECT_EQ(kv4_model_with_layers(flash, &kind, 1, &stack), KV4_BAD_ARGUMENT);
  EXPECT_NE(std::string(kv4_last_error()).find("V4.1"), std::string::npos) << kv4_last_error();
  EXPECT_EQ(stack, nullptr);
  kv4_model_free(flash);
}

TEST_F(CApi, ErrorsNameTheValue) {
  kv4_model* none = nullptr;
  expect_error(kv4_model_preset("v5", &none), KV4_BAD_ARGUMENT, "v5");
  expect_error(kv4_model_preset(nullptr, &none), KV4_BAD_ARGUMENT, "name is NULL");
  expect_error(kv4_model_parse("{", 1, &none), KV4_BAD_CONFIG, "JSON");
  EXPECT_EQ(none, nullptr);
  kv4_backend* backend = nullptr;
  expect_error(kv4_backend_cpu(0, &backend), KV4_BAD_ARGUMENT, "0");

  kv4_cache_options wrong = options;
  wrong.row_format = "int3";
  expect_error(kv4_cache_new(model, &wrong, nullptr, &cache), KV4_BAD_ARGUMENT, "int3");
  wrong = options;
  wrong.snapshots = "some";
  expect_error(kv4_cache_new(model, &wrong, nullptr, &cache), KV4_BAD_ARGUMENT, "some");
  EXPECT_EQ(cache, nullptr);

  ASSERT_NO_FATAL_FAILURE(open());
  const kv4_request request = admit();
  const kv4_step_item item = {sizeof(kv4_step_item), request, 2, ids.data(), -1};
  kv4_step step;
  kv4_step_init(&step, sizeof(kv4_step));
  ASSERT_EQ(kv4_cache_prepare_forward(cache, &item, 1, 0, &step), KV4_OK);
  Tensor raw(x, {2, 512});
  raw.c.device_type = 2;
  expect_error(kv4_cache_write_swa(cache, 0, raw), KV4_BAD_ARGUMENT, "device 2:0");
  raw.c.device_type = 1;
  raw.c.dtype_bits = 64;
  expect_error(kv4_cache_write_swa(cache, 0, raw), KV4_BAD_ARGUMENT, "64 bits");
  raw.c.dtype_bits = 32;
  raw.c.ndim = 9;
  expect_error(kv4_cache_write_swa(cache, 0, raw), KV4_BAD_ARGUMENT, "9 dimensions");
  raw.c.ndim = 2;
  raw.shape[0] = 3;
  expect_error(kv4_cache_write_swa(cache, 0, raw), KV4_BAD_ARGUMENT, "3");
  raw.shape[0] = 2;
  expect_error(kv4_cache_write_swa(cache, 0, nullptr), KV4_BAD_ARGUMENT, "raw_kv is NULL");
  expect_error(kv4_cache_write_swa(nullptr, 0, raw), KV4_BAD_ARGUMENT, "cache is NULL");
  expect_error(kv4_cache_prepare_forward(cache, &item, 1, 0, &step), KV4_BAD_STATE, "step");
  ASSERT_EQ(kv4_cache_abort(cache, &step), KV4_OK);
  std::int64_t count = 0;
  ASSERT_NO_FATAL_FAILURE(forward(request, 5));
  std::int32_t few[2];
  expect_error(kv4_cache_token_ids(cache, request, few, 2, &count), KV4_BAD_ARGUMENT, "there are 5");
  EXPECT_EQ(count, 5);
}

TEST_F(CApi, AFolderSaysHowTheCacheStands) {
  ASSERT_NO_FATAL_FAILURE(open());
  const std::filesystem::path folder = std::filesystem::path(::testing::TempDir()) / "kv4_c_api_status";
  std::filesystem::remove_all(folder);
  kv4_status_folder *status = nullptr, *second = nullptr;
  kv4_status_options often;
  kv4_status_options_init(&often, sizeof(kv4_status_options));
  often.interval_ms = 0;
  ASSERT_EQ(kv4_status_folder_new(cache, folder.c_str(), &often, &status), KV4_OK) << kv4_last_error();
  expect_error(kv4_status_folder_new(cache, folder.c_str(), &often, &second), KV4_BAD_STATE, "in use");
  const kv4_request request = admit();
  ASSERT_NO_FATAL_FAILURE(forward(request, 5));
  const std::filesystem::path wanted = folder / ("inspect-" + std::to_string(request) + "-0000000000000001.wanted"),
                              answer = folder / ("inspect-" + std::to_string(request) + "-0000000000000001.kv4s");
  std::ofstream(wanted).flush();
  ASSERT_EQ(kv4_status_folder_publish(status), KV4_OK) << kv4_last_error();
  EXPECT_TRUE(std::filesystem::exists(folder / "status.json"));
  EXPECT_TRUE(std::filesystem::exists(answer) && !std::filesystem::exists(wanted));
  std::filesystem::remove_all(folder);
  expect_error(kv4_status_folder_publish(status), KV4_BAD_FILE, "status.failed");
  kv4_status_folder_free(status);
  kv4_status_folder_free(nullptr);
}

TEST(CApiLog, IsForwarded) {
  std::string heard;
  const kv4_log_sink sink = [](void* user, kv4_log_level level, const char* event, const char* message,
                               const kv4_log_field* fields, int64_t num_fields) {
    std::string& out = *static_cast<std::string*>(user);
    out = std::to_string(level) + " " + event + ": " + message;
    for (int64_t i = 0; i < num_fields; ++i) out += std::string(" ") + fields[i].name + "=" + fields[i].value;
  };
  ASSERT_EQ(kv4_set_log_sink(sink, &heard), KV4_OK);
  kv4::log(kv4::LogLevel::warning, "tier.opened", "it fails",
           {{"tier", "disk"}, {"reason", std::string_view("full!!", 4)}});
  ASSERT_EQ(kv4_set_log_sink(nullptr, nullptr), KV4_OK);
  kv4::log(kv4::LogLevel::error, "later", "nobody hears", {});
  EXPECT_EQ(heard, "1 tier.opened: it fails tier=disk reason=full");
}

TEST_F(CApi, StructsMayGrow) {
  // An older caller knows only the first fields; the others have their defaults.
  kv4_cache_options older = options;
  older.size = offsetof(kv4_cache_options, hadamard);
  older.max_requests = -5;  // after its end
  kv4_memory_plan plan;
  kv4_memory_plan_init(&plan, sizeof(kv4_memory_plan));
  ASSERT_EQ(kv4_model_plan_memory(model, &older, &plan), KV4_OK) << kv4_last_error();
  const std::int64_t total = plan.total_bytes;
  ASSERT_EQ(kv4_model_plan_memory(model, nullptr, &plan), KV4_OK);
  EXPECT_EQ(plan.total_bytes, total);

  // A newer caller: fields that this library does not know must be unset.
  struct Newer {
    kv4_cache_options known;
    std::int64_t unknown;
  } newer = {options, 0};
  newer.known.size = sizeof(newer);
  EXPECT_EQ(kv4_model_plan_memory(model, &newer.known, &plan), KV4_OK) << kv4_last_error();
  newer.unknown = 1;
  EXPECT_EQ(kv4_model_plan_memory(model, &newer.known, &plan), KV4_BAD_ARGUMENT);

  // Results fill the caller's struct and nothing after it.
  struct Results {
    kv4_memory_plan known;
    std::int64_t after;
  } results;
  kv4_memory_plan_init(&results.known, sizeof(kv4_memory_plan));
  results.known.size = sizeof(results);
  results.after = 99;
  ASSERT_EQ(kv4_model_plan_memory(model, &options, &results.known), KV4_OK);
  EXPECT_EQ(results.after, 0);
  EXPECT_EQ(results.known.size, sizeof(results));
  kv4_memory_plan shorter;
  kv4_memory_plan_init(&shorter, sizeof(kv4_memory_plan));
  shorter.size = offsetof(kv4_memory_plan, total_bytes);
  shorter.total_bytes = 99;
  ASSERT_EQ(kv4_model_plan_memory(model, &options, &shorter), KV4_OK);
  EXPECT_EQ(shorter.total_bytes, 99);
  EXPECT_GT(shorter.block_bytes, 0);
  shorter.size = 0;
  EXPECT_EQ(kv4_model_plan_memory(model, &options, &shorter), KV4_BAD_ARGUMENT);
}

TEST_F(CApi, ThePoolIsAManagedTensor) {
  ASSERT_NO_FATAL_FAILURE(open());
  kv4_cache_info info;
  kv4_cache_info_init(&info, sizeof(kv4_cache_info));
  ASSERT_EQ(kv4_cache_get_info(cache, &info), KV4_OK);
  kv4_managed_tensor* pool = nullptr;
  ASSERT_EQ(kv4_cache_pool(cache, &pool), KV4_OK);
  EXPECT_EQ(pool->tensor.shape[0], info.num_blocks * info.block_bytes);
  EXPECT_EQ(pool->tensor.device_type, 1);

  // Views point into the pool.
  const kv4_request request = admit();
  ASSERT_NO_FATAL_FAILURE(forward(request, 130));
  const kv4_step_item item = {sizeof(kv4_step_item), request, 1, ids.data(), -1};
  kv4_step step;
  kv4_step_init(&step, sizeof(kv4_step));
  ASSERT_EQ(kv4_cache_prepare_forward(cache, &item, 1, 0, &step), KV4_OK);
  kv4_rows_view entries, keys;
  kv4_rows_view_init(&entries, sizeof(kv4_rows_view));
  kv4_rows_view_init(&keys, sizeof(kv4_rows_view));
  kv4_swa_view window;
  kv4_swa_view_init(&window, sizeof(kv4_swa_view));
  ASSERT_EQ(kv4_cache_read_classical_view(cache, 1, &entries), KV4_OK) << kv4_last_error();
  ASSERT_EQ(kv4_cache_read_indexer_view(cache, 1, &keys), KV4_OK) << kv4_last_error();
  ASSERT_EQ(kv4_cache_read_swa_view(cache, 1, &window), KV4_OK) << kv4_last_error();
  const auto* base = static_cast<const std::uint8_t*>(pool->tensor.data);
  for (const std::uint8_t* data : {entries.payload.data, keys.payload.data}) {
    EXPECT_GE(data, base);
    EXPECT_LT(data, base + pool->tensor.shape[0]);
  }
  EXPECT_EQ(entries.lens[0], 32);
  EXPECT_EQ(entries.payload.row_bytes, 576);
  EXPECT_EQ(keys.payload.row_bytes, 64);
  EXPECT_EQ(keys.global_scale.data, nullptr);
  EXPECT_EQ(window.rows, 132);
  ASSERT_EQ(kv4_cache_abort(cache, &step), KV4_OK);
  pool->deleter(pool);
}

}  // namespace
}  // namespace kv4::test::c_api
