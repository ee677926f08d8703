# What can be switched, in one place.
option(SIEVEMLA_BUILD_CLI "Build the sievemla program (needs CLI11, fmt, nlohmann-json)" ${PROJECT_IS_TOP_LEVEL})
option(SIEVEMLA_BUILD_TESTS "Build the tests (needs GoogleTest, rapidcheck)" OFF)
option(SIEVEMLA_WERROR "Treat warnings as errors" ${PROJECT_IS_TOP_LEVEL})
set(SIEVEMLA_SANITIZE "" CACHE STRING "Sanitizers, e.g. address,undefined or thread")

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
