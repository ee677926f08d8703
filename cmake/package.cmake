# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# What `cmake --install` writes: headers, library, program, and the package that find_package(sievemla) finds.
if(NOT SIEVEMLA_INSTALL)
  return()
endif()
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/sievemla)

install(TARGETS sievemla EXPORT sievemla_targets)
install(DIRECTORY include/sievemla TYPE INCLUDE)
install(EXPORT sievemla_targets NAMESPACE sievemla:: FILE sievemlaTargets.cmake DESTINATION ${package_dir})
if(TARGET sievemla_cli)
  install(TARGETS sievemla_cli)
endif()

# A static library hands its own dependencies on to whoever links it.
set(SIEVEMLA_DEPENDENCIES "")
get_target_property(type sievemla TYPE)
if(type STREQUAL STATIC_LIBRARY)
  if(OpenMP_CXX_FOUND)
    string(APPEND SIEVEMLA_DEPENDENCIES "find_dependency(OpenMP COMPONENTS CXX)\n")
  endif()
  if(SIEVEMLA_WITH_CUDA)
    string(APPEND SIEVEMLA_DEPENDENCIES "find_dependency(CUDAToolkit)\n")
  endif()
endif()
configure_package_config_file(cmake/sievemlaConfig.cmake.in sievemlaConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(sievemlaConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/sievemlaConfig.cmake ${PROJECT_BINARY_DIR}/sievemlaConfigVersion.cmake
        DESTINATION ${package_dir})

# cpack -G DEB, cpack -G TGZ
set(CPACK_PACKAGE_CONTACT "The SieveMLA authors")
set(CPACK_PACKAGE_VENDOR "The SieveMLA authors")
set(CPACK_RESOURCE_FILE_LICENSE ${PROJECT_SOURCE_DIR}/LICENSE)
set(CPACK_STRIP_FILES ON)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
include(CPack)
