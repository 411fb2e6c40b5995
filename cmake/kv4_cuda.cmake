# The CUDA part of kv4_objects, where nvcc is found. The runtime is linked statically: only the driver is needed where
# it runs. Kernels are built for Hopper, and as PTX for everything from sm_80 on.
set(KV4_CUDA_LIBRARIES "")
set(KV4_HAS_CUDA FALSE)
if(KV4_CUDA STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    set(KV4_HAS_CUDA TRUE)
  endif()
elseif(KV4_CUDA)
  set(KV4_HAS_CUDA TRUE)
endif()

if(KV4_RACECHECK AND NOT KV4_HAS_CUDA)
  message(FATAL_ERROR "KV4_RACECHECK is about CUDA kernels; there is no nvcc, or KV4_CUDA is OFF")
endif()
if(NOT KV4_HAS_CUDA)
  message(STATUS "CUDA: not built (KV4_CUDA=${KV4_CUDA}, no nvcc)")
  target_sources(kv4_objects PRIVATE src/backend/cuda/runtime/no_cuda.cc)
  return()
endif()

set_source_files_properties(src/cache/status_folder.cc PROPERTIES COMPILE_DEFINITIONS KV4_HAS_CUDA)
set(CMAKE_CUDA_ARCHITECTURES OFF)  # spelled out below: CMake would give every one of them both machine code and PTX
enable_language(CUDA)
find_package(CUDAToolkit 12.8 REQUIRED)
message(STATUS "CUDA: built with ${CMAKE_CUDA_COMPILER} ${CMAKE_CUDA_COMPILER_VERSION}")
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake 3.25 does not know that nvcc can
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
string(REPLACE "-DNDEBUG" "" CMAKE_CUDA_FLAGS_RELEASE "${CMAKE_CUDA_FLAGS_RELEASE}")
target_sources(kv4_objects PRIVATE
  src/backend/cuda/append/dispatch.cu
  src/backend/cuda/append/generic.cu
  src/backend/cuda/attend/dispatch.cu
  src/backend/cuda/attend/foreign.cu
  src/backend/cuda/attend/generic.cu
  src/backend/cuda/attend/persistent.cu
  src/backend/cuda/attend/persistent_window.cu
  src/backend/cuda/attend/select.cc
  src/backend/cuda/attend/single_pass_window.cu
  src/backend/cuda/attend/small_batch.cu
  src/backend/cuda/attend/split_kv.cu
  src/backend/cuda/attend/stage_rows.cu
  src/backend/cuda/attend/staged.cu
  src/backend/cuda/attend/token_pair.cu
  src/backend/cuda/index/dispatch.cu
  src/backend/cuda/index/fp8.cu
  src/backend/cuda/index/fp8_raw.cu
  src/backend/cuda/index/generic.cu
  src/backend/cuda/index/grouped.cu
  src/backend/cuda/index/mxfp4.cu
  src/backend/cuda/index/ranges.cu
  src/backend/cuda/move/copy.cu
  src/backend/cuda/move/gather.cu
  src/backend/cuda/move/slots_generic.cu
  src/backend/cuda/move/snapshot.cu
  src/backend/cuda/move/step_tables.cu
  src/backend/cuda/topk/dispatch.cu
  src/backend/cuda/topk/rescore.cu
  src/backend/cuda/topk/select.cu
  src/backend/cuda/runtime/check.cc
  src/backend/cuda/runtime/cuda_backend.cc
  src/backend/cuda/runtime/pinned_memory.cc
  src/backend/cuda/runtime/raw_calls.cc
  src/backend/cuda/runtime/upload_ring.cc
)
set_target_properties(kv4_objects PROPERTIES CUDA_ARCHITECTURES OFF CUDA_VISIBILITY_PRESET hidden)
# The same arithmetic as on the host: nothing is fused that the source does not fuse, denormals are kept.
target_compile_options(kv4_objects PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:
  -fmad=false --expt-relaxed-constexpr
  -gencode=arch=compute_80,code=compute_80
  -gencode=arch=compute_90a,code=sm_90a>)
if(KV4_RACECHECK)  # and where hazards are
  target_compile_options(kv4_objects PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-DKV4_RACECHECK -lineinfo>)
endif()
target_include_directories(kv4_objects PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
# The kernels that KV4_RACECHECK changes, compiled with it for Hopper alone: that they do compile (./test --all).
add_library(kv4_racecheck_objects OBJECT EXCLUDE_FROM_ALL
  src/backend/cuda/attend/persistent.cu
  src/backend/cuda/attend/persistent_window.cu
  src/backend/cuda/attend/small_batch.cu
  src/backend/cuda/attend/split_kv.cu
  src/backend/cuda/attend/stage_rows.cu
  src/backend/cuda/attend/staged.cu
  src/backend/cuda/attend/token_pair.cu
  src/backend/cuda/move/copy.cu
)
set_target_properties(kv4_racecheck_objects PROPERTIES CUDA_ARCHITECTURES OFF)
target_compile_options(kv4_racecheck_objects PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:
  -DKV4_RACECHECK -fmad=false --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a>)
target_include_directories(kv4_racecheck_objects PRIVATE
  include ${PROJECT_BINARY_DIR}/include src ${CUDAToolkit_INCLUDE_DIRS})
set(KV4_CUDA_LIBRARIES CUDA::cudart_static)
set(KV4_CUDA_INCLUDE_DIRS ${CUDAToolkit_INCLUDE_DIRS} CACHE INTERNAL "")
