# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# cmake -D SOURCE=DIR -D PROJECT_VERSION=V -D OUTPUT=FILE -P version.cmake -- writes version.h. Every build runs it, so
# that the commit in a result is the one that was built; the file changes, and what includes it is compiled, only when
# that does.
find_package(Git QUIET)
set(SIEVEMLA_COMMIT unknown)
if(Git_FOUND)
  execute_process(COMMAND ${GIT_EXECUTABLE} describe --always --dirty WORKING_DIRECTORY ${SOURCE}
                  OUTPUT_VARIABLE described OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(NOT failed)
    set(SIEVEMLA_COMMIT ${described})
  endif()
endif()
configure_file(${SOURCE}/src/version.h.in ${OUTPUT})
