# The CUDA part of kv4_objects, where nvcc is found. The runtime is linked statically: only the driver is needed where it
# runs. Kernels are built for Hopper, and as PTX for everything from sm_80 on.
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
  target_sources(kv4_objects PRIVATE src/backend/cuda/no_cuda.cc)
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
  src/backend/cuda/append.cu
  src/backend/cuda/append_plain.cu
  src/backend/cuda/attend.cu
  src/backend/cuda/attend_plain.cu
  src/backend/cuda/attend_runs.cu
  src/backend/cuda/attend_small.cu
  src/backend/cuda/attend_window.cu
  src/backend/cuda/boundary.cu
  src/backend/cuda/copy.cu
  src/backend/cuda/expand.cu
  src/backend/cuda/gather.cu
  src/backend/cuda/index.cu
  src/backend/cuda/index_fp8.cu
  src/backend/cuda/index_fp8_raw.cu
  src/backend/cuda/index_mxfp4.cu
  src/backend/cuda/index_plain.cu
  src/backend/cuda/topk.cu
  src/backend/cuda/topk_near.cu
  src/backend/cuda/cuda_backend.cc
  src/backend/cuda/cuda_check.cc
  src/backend/cuda/pinned_memory.cc
  src/backend/cuda/upload_ring.cc
)
set_target_properties(kv4_objects PROPERTIES CUDA_ARCHITECTURES OFF CUDA_VISIBILITY_PRESET hidden)
# The same arithmetic as on the host: nothing is fused that the source does not fuse, denormals are kept.
target_compile_options(kv4_objects PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:
  -fmad=false --expt-relaxed-constexpr -Xptxas=-v
  -gencode=arch=compute_80,code=compute_80
  -gencode=arch=compute_90a,code=sm_90a>)
if(KV4_RACECHECK)  # and where hazards are
  target_compile_options(kv4_objects PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-DKV4_RACECHECK -lineinfo>)
endif()
target_include_directories(kv4_objects PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
# The kernels that KV4_RACECHECK changes, compiled with it for Hopper alone: that they do compile (./test --all).
add_library(kv4_racecheck_objects OBJECT EXCLUDE_FROM_ALL
  src/backend/cuda/attend.cu
  src/backend/cuda/attend_runs.cu
  src/backend/cuda/attend_small.cu
  src/backend/cuda/copy.cu
)
set_target_properties(kv4_racecheck_objects PROPERTIES CUDA_ARCHITECTURES OFF)
target_compile_options(kv4_racecheck_objects PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:
  -DKV4_RACECHECK -fmad=false --expt-relaxed-constexpr -gencode=arch=compute_90a,code=sm_90a>)
target_include_directories(kv4_racecheck_objects PRIVATE
  include ${PROJECT_BINARY_DIR}/include src ${CUDAToolkit_INCLUDE_DIRS})
set(KV4_CUDA_LIBRARIES CUDA::cudart_static)
set(KV4_CUDA_INCLUDE_DIRS ${CUDAToolkit_INCLUDE_DIRS} CACHE INTERNAL "")
