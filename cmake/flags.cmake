# Language level and warnings of every target of this project.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)

add_library(sievemla_flags INTERFACE)
target_compile_options(sievemla_flags INTERFACE -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion
                       -fno-math-errno -ffp-contract=off)  # contraction would make results depend on the compiler
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  target_compile_options(sievemla_flags INTERFACE -Wno-restrict)  # g++ 12 warns about std::string's operator+ itself
endif()
if(SIEVEMLA_WERROR)
  target_compile_options(sievemla_flags INTERFACE -Werror)
endif()
if(SIEVEMLA_SANITIZE)
  target_compile_options(sievemla_flags INTERFACE -fsanitize=${SIEVEMLA_SANITIZE} -fno-omit-frame-pointer -g)
  target_link_options(sievemla_flags INTERFACE -fsanitize=${SIEVEMLA_SANITIZE})
endif()
