# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# sievemla_sources(FILE...): sources of this room that belong to the library. They are compiled into `sievemla`, and
# once more, with SIEVEMLA_FAULTS=1, into the test library `sievemla_faulty` (src/base/fault.h).
set_property(GLOBAL PROPERTY SIEVEMLA_SOURCES "")
function(sievemla_sources)
  foreach(file IN LISTS ARGN)
    set_property(GLOBAL APPEND PROPERTY SIEVEMLA_SOURCES ${CMAKE_CURRENT_SOURCE_DIR}/${file})
  endforeach()
endfunction()
