# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# sievemla_isa_sources(TIER FILE...): sources of this room for one tier of src/cpu/isa/isa.h, compiled with its flags.
# They exist on x86-64 alone; registries name their kernels under #if defined(__x86_64__). A file of a tier defines no
# symbol that another file may define too (docs/kernels/attention-cpu.md); the test Isa.Symbols looks into the objects.
set(SIEVEMLA_ISAS portable)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND SIEVEMLA_ISAS avx2 avx512 avx512bf16 amx)
endif()
set(isa_flags_portable "")
set(isa_flags_avx2 -mavx2 -mfma -mf16c)
set(isa_flags_avx512 ${isa_flags_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512)
set(isa_flags_avx512bf16 ${isa_flags_avx512} -mavx512bf16)
set(isa_flags_amx ${isa_flags_avx512bf16} -mamx-tile -mamx-bf16)

if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  set(isa_warnings -Wno-uninitialized -Wno-maybe-uninitialized)  # g++ 12 warns about its own AVX-512 intrinsics
endif()

# Sources of this folder are compiled with the flags of a tier, by the targets that TARGETS_IN makes.
set_property(GLOBAL PROPERTY SIEVEMLA_ISA_SOURCES "")
function(sievemla_isa_flags tier targets_in)
  foreach(file IN LISTS ARGN)
    set_source_files_properties(${CMAKE_CURRENT_SOURCE_DIR}/${file} DIRECTORY ${targets_in} PROPERTIES
                                COMPILE_OPTIONS "${isa_flags_${tier}};${isa_warnings}")
    set_property(GLOBAL APPEND PROPERTY SIEVEMLA_ISA_SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/${file})
  endforeach()
endfunction()

function(sievemla_isa_sources tier)
  if(NOT tier IN_LIST SIEVEMLA_ISAS)
    return()
  endif()
  sievemla_sources(${ARGN})
  sievemla_isa_flags(${tier} ${PROJECT_SOURCE_DIR}/src ${ARGN})
endfunction()
