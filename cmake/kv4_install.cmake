# What `cmake --install` puts where: headers, the shared library, the command line tool, kv4Config.cmake and kv4.pc.
# The tree may be moved afterwards: nothing in it names the prefix.
include(CMakePackageConfigHelpers)

install(TARGETS kv4 EXPORT kv4Targets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  INCLUDES DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES include/kv4.h include/kv4_chunks.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY include/kv4 DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h" PATTERN "cuda.h" EXCLUDE)
if(KV4_HAS_CUDA)
  install(FILES include/kv4/cuda.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/kv4)
endif()
install(FILES ${PROJECT_BINARY_DIR}/include/kv4/version.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/kv4)

if(TARGET kv4_cli)
  file(RELATIVE_PATH KV4_BIN_TO_LIB ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
  set_target_properties(kv4_cli PROPERTIES INSTALL_RPATH "$ORIGIN/${KV4_BIN_TO_LIB}")
  install(TARGETS kv4_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

set(KV4_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/kv4)
install(EXPORT kv4Targets NAMESPACE kv4:: DESTINATION ${KV4_PACKAGE_DIR})
configure_package_config_file(cmake/kv4Config.cmake.in ${PROJECT_BINARY_DIR}/kv4Config.cmake
  INSTALL_DESTINATION ${KV4_PACKAGE_DIR} NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/kv4ConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/kv4Config.cmake ${PROJECT_BINARY_DIR}/kv4ConfigVersion.cmake
  DESTINATION ${KV4_PACKAGE_DIR})

# kv4.pc finds the prefix from its own place, two or more folders below it.
file(RELATIVE_PATH KV4_PC_TO_PREFIX ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" KV4_PC_TO_PREFIX "${KV4_PC_TO_PREFIX}")
configure_file(cmake/kv4.pc.in ${PROJECT_BINARY_DIR}/kv4.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/kv4.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)

# `cpack -G DEB` in the build folder: one package with all of the above.
set(CPACK_PACKAGE_NAME kv4)
set(CPACK_PACKAGE_VENDOR "kv4")
set(CPACK_PACKAGE_CONTACT "the kv4 authors")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY ${PROJECT_DESCRIPTION})
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION libs)
find_program(KV4_SHLIBDEPS dpkg-shlibdeps)
if(KV4_SHLIBDEPS)  # the packages of the libraries it links
  set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
else()
  set(CPACK_DEBIAN_PACKAGE_DEPENDS "libc6, libstdc++6, libhwy1, libfmt9, liburing2, libssl3, zlib1g, libhiredis0.14, libbenchmark1debian, libprometheus-cpp-core1.0, libmicrohttpd12")
endif()
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} RENAME copyright)
include(CPack)
