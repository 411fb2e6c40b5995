// One table of row kernels per instruction set with fused multiply-add; Highway compiles this file once for each and
// chooses at run time. Other instruction sets (SSE, plain emulation) use the plain table: without a fused operation the
// bytes would differ.
#define HWY_WANT_AVX3_DL 1  // byte dot products (VNNI)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backend/cpu/row_kernels_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "backend/cpu/row_kernels.h"

// Without fused multiply-add: emulation, and the x86 targets before AVX2 (a higher bit is an older set).
#if HWY_TARGET == HWY_EMU128 || HWY_TARGET == HWY_SCALAR || (HWY_ARCH_X86 && HWY_TARGET > HWY_AVX2)
#define KV4_SIMD_TABLE 0
#else
#include "backend/cpu/simd_attend-inl.h"
#include "backend/cpu/simd_codec-inl.h"
#include "backend/cpu/simd_compress-inl.h"
#include "backend/cpu/simd_score-inl.h"
#define KV4_SIMD_TABLE 1
#endif

HWY_BEFORE_NAMESPACE();
namespace kv4::cpu::HWY_NAMESPACE {

const RowKernels* simd_table() {
#if KV4_SIMD_TABLE
  static const RowKernels table{hwy::TargetName(HWY_TARGET),
                                convert,
                                load_as_bf16,
                                fold,
                                mean,
                                pool,
                                angles,
                                finish,
                                rotate,
                                project,
                                hadamard,
                                encode,
                                encode_input,
                                decode,
                                prepare_query,
                                score,
                                prepare_heads,
                                attend};
  return &table;
#else
  return &plain_row_kernels();
#endif
}

}  // namespace kv4::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#undef KV4_SIMD_TABLE

#if HWY_ONCE
namespace kv4::cpu {

HWY_EXPORT(simd_table);

const RowKernels& best_row_kernels() { return *HWY_DYNAMIC_DISPATCH(simd_table)(); }

std::vector<const RowKernels*> runnable_row_kernels() {
  std::vector<const RowKernels*> out{&plain_row_kernels()};
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    const RowKernels* table = HWY_DYNAMIC_DISPATCH(simd_table)();
    if (table != out[0]) out.push_back(table);
  }
  hwy::SetSupportedTargetsForTest(0);
  return out;
}

}  // namespace kv4::cpu
#endif
