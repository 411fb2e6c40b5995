// attend: chooses a kernel for the current device (select.cc) and launches it.
#include "backend/cuda/attend/foreign.cuh"
#include "backend/cuda/attend/kernels.h"
#include "backend/cuda/runtime/launch.cuh"
#include "backend/nvtx_range.h"
#include "kv4/cuda.h"

namespace kv4::cuda {

const AttendGpu& attend_gpu() {
  static const AttendGpu other;
  if (!is_sm90()) return other;
  static const AttendGpu hopper{true, num_sms(), count_wgmma_clusters(), count_small_batch_clusters()};
  return hopper;
}

cudaError_t attend_split(const ops::AttendParams& p, const AttendSplit& split, cudaStream_t stream) {
  const AttendKernelInfo& kernel = attend_kernels()[static_cast<std::size_t>(split.kernel)];
  return kernel.can_run(p, split) ? kernel.launch(p, split, stream) : cudaErrorInvalidValue;
}

namespace {

cudaError_t launch_selected(const ops::AttendParams& p, const AttendSplit& split, cudaStream_t stream) {
  return attend_kernels()[static_cast<std::size_t>(split.kernel)].launch(p, split, stream);
}

}  // namespace

cudaError_t attend(const ops::AttendParams& p, cudaStream_t stream) {
  const NvtxRange range("kv4 launch attend", true);
  if (p.step.num_tokens <= 0 || p.num_heads <= 0) return cudaSuccess;
  const AttendSplit split = select_attend(p, attend_gpu());
  if (split.kernel != AttendKernel::generic) return launch_selected(p, split, stream);
  const ForeignAttend foreign = plan_foreign(p);
  const AttendSplit tuned = foreign.is_possible ? select_attend(foreign.plain, attend_gpu()) : split;
  if (tuned.kernel == AttendKernel::generic) return launch_selected(p, split, stream);
  if (const cudaError_t status = before_foreign(p, stream); status != cudaSuccess) return status;
  if (const cudaError_t status = launch_selected(foreign.plain, tuned, stream); status != cudaSuccess) return status;
  return after_foreign(p, foreign.plain, stream);
}

}  // namespace kv4::cuda
