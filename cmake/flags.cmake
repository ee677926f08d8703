# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# Language level, warnings and sanitizers of every target of this project. No -march here: code for one ISA is a file of
# its own with flags of its own.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

find_program(SIEVEMLA_CCACHE ccache)
mark_as_advanced(SIEVEMLA_CCACHE)
if(SIEVEMLA_CCACHE AND NOT DEFINED CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${SIEVEMLA_CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${SIEVEMLA_CCACHE})
endif()

set(warnings -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  list(APPEND warnings -Wno-restrict)  # g++ 12 warns about std::string's operator+ itself
endif()
if(SIEVEMLA_WERROR)
  list(APPEND warnings -Werror)
endif()
add_library(sievemla_flags INTERFACE)
target_compile_options(sievemla_flags INTERFACE $<$<COMPILE_LANGUAGE:CXX>:${warnings}
                       -fno-math-errno -ffp-contract=off>)  # contraction would make results depend on the compiler

if(SIEVEMLA_SANITIZE)
  # For the whole directory: a sanitizer is a property of a build, not of a library.
  add_compile_options(-fsanitize=${SIEVEMLA_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  add_link_options(-fsanitize=${SIEVEMLA_SANITIZE})
  if(SIEVEMLA_SANITIZE MATCHES address)
    add_compile_definitions(_GLIBCXX_ASSERTIONS)
  endif()
endif()
if(SIEVEMLA_SANITIZE MATCHES thread)
  # OpenMP's own synchronisation is invisible to ThreadSanitizer unless the Archer tool tells it. libomp loads
  # libarcher.so by itself where it finds it; an RPATH (not a RUNPATH) of the program is searched for libomp too.
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-resource-dir  # <llvm>/lib/clang/<version>
                  OUTPUT_VARIABLE clang_dir OUTPUT_STRIP_TRAILING_WHITESPACE)
  find_library(SIEVEMLA_ARCHER archer PATHS ${clang_dir}/../.. REQUIRED)
  cmake_path(GET SIEVEMLA_ARCHER PARENT_PATH archer_dir)
  add_link_options(-Wl,--disable-new-dtags,-rpath,${archer_dir})
endif()
