# Flags every target shares. Results are bytes, so the compiler may not fuse or reorder floating point arithmetic.
add_library(kv4_warnings INTERFACE)
target_compile_options(kv4_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wshadow;-Wconversion;-Wno-sign-conversion;-Wnon-virtual-dtor>)
add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off> $<$<COMPILE_LANGUAGE:CXX>:-fno-fast-math>)
add_compile_options($<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-ffp-contract=off>)
if(CMAKE_BUILD_TYPE STREQUAL "Release")
  string(REPLACE "-DNDEBUG" "" CMAKE_CXX_FLAGS_RELEASE "${CMAKE_CXX_FLAGS_RELEASE}")
  string(REPLACE "-O3" "-O2" CMAKE_CXX_FLAGS_RELEASE "${CMAKE_CXX_FLAGS_RELEASE}")
endif()
if(KV4_SANITIZE)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${KV4_SANITIZE}> $<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=all>
    $<$<COMPILE_LANGUAGE:CXX>:-fno-omit-frame-pointer> $<$<COMPILE_LANGUAGE:CXX>:-g1>)
  add_link_options(-fsanitize=${KV4_SANITIZE})
endif()
