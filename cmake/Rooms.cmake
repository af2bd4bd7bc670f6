# One library and one test program a room.
#   titanium_room(NAME SOURCES a.cpp ... LIBS other ... [TORCH])   -> library titanium_NAME
#   titanium_room_test(NAME a_test.cpp ... [LABELS slow])           -> program test_NAME, one CTest entry
#   titanium_fuzzer(NAME file.cpp LIBS titanium_x ...)              -> libFuzzer program fuzz_NAME (clang)
# Programs outside get the libraries as titanium::NAME from find_package(titanium), out of the build folder (Export.cmake).
add_library(titanium_flags INTERFACE)
target_include_directories(titanium_flags INTERFACE ${CMAKE_SOURCE_DIR})
target_compile_options(titanium_flags INTERFACE -fPIC -Wall -Wextra -Werror -Wno-unknown-pragmas -fvisibility=hidden
  $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>)  # for ccache
if(TITANIUM_SANITIZE)
  # Function multiversioning resolves through ifuncs that run before a sanitizer is ready.
  target_compile_definitions(titanium_flags INTERFACE TITANIUM_NO_CLONES)
  target_compile_options(titanium_flags INTERFACE -fsanitize=${TITANIUM_SANITIZE} -fno-omit-frame-pointer)
  target_link_options(titanium_flags INTERFACE -fsanitize=${TITANIUM_SANITIZE})
  if(TITANIUM_SANITIZE MATCHES thread)  # a fence in the standard library's <memory>, of libtorch's headers
    target_compile_options(titanium_flags INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-tsan>)
  endif()
  if(TITANIUM_SANITIZE MATCHES undefined)
    target_compile_options(titanium_flags INTERFACE -fno-sanitize-recover=undefined)
  endif()
endif()

set(TITANIUM_ROOMS "" CACHE STRING "Build these rooms only, e.g. base;ops (empty: all)")

if(TITANIUM_FUZZ)  # a fuzzer sees the coverage of the rooms that it calls
  target_compile_options(titanium_flags INTERFACE -fsanitize=fuzzer-no-link)
  target_link_options(titanium_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()

function(titanium_add_room room)
  if(TITANIUM_ROOMS AND NOT room IN_LIST TITANIUM_ROOMS)
    return()
  endif()
  if(EXISTS ${CMAKE_SOURCE_DIR}/titanium/${room}/CMakeLists.txt)
    add_subdirectory(titanium/${room} rooms/${room})  # the name `titanium` in the build folder is the command's
  endif()
endfunction()

function(titanium_room room)
  cmake_parse_arguments(ARG "TORCH" "" "SOURCES;LIBS" ${ARGN})
  add_library(titanium_${room} STATIC ${ARG_SOURCES})
  set_target_properties(titanium_${room} PROPERTIES EXPORT_NAME ${room})
  set_property(GLOBAL APPEND PROPERTY TITANIUM_EXPORTS titanium_${room})
  target_link_libraries(titanium_${room} PUBLIC titanium_flags ${ARG_LIBS})
  if(ARG_TORCH)
    target_link_libraries(titanium_${room} PUBLIC titanium_torch)
    target_precompile_headers(titanium_${room} REUSE_FROM titanium_pch)
  endif()
endfunction()

function(titanium_room_test room)
  cmake_parse_arguments(ARG "" "NAME;TIMEOUT" "LABELS;LIBS" ${ARGN})
  set(name ${room})
  if(ARG_NAME)
    set(name ${ARG_NAME})
  endif()
  set(timeout 300)
  if(ARG_TIMEOUT)
    set(timeout ${ARG_TIMEOUT})
  endif()
  if(TITANIUM_SANITIZE)
    math(EXPR timeout "${timeout} * 5")  # slower by that, or more on a busy machine
  endif()
  add_executable(test_${name} ${ARG_UNPARSED_ARGUMENTS})
  target_link_libraries(test_${name} PRIVATE titanium_${room} ${ARG_LIBS} GTest::gtest_main)
  target_compile_definitions(test_${name} PRIVATE TITANIUM_SOURCE_DIR="${CMAKE_SOURCE_DIR}"
    TITANIUM_BINARY_DIR="${CMAKE_BINARY_DIR}")
  get_target_property(libs titanium_${room} LINK_LIBRARIES)
  if("titanium_torch" IN_LIST libs)
    target_precompile_headers(test_${name} REUSE_FROM titanium_pch)
  endif()
  add_test(NAME ${name} COMMAND test_${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT ${timeout} LABELS "${room};${ARG_LABELS}"
    ENVIRONMENT GOMP_SPINCOUNT=10000)  # as the command sets it (base/openmp.h)
endfunction()

function(titanium_fuzzer name source)
  cmake_parse_arguments(ARG "" "" "LIBS" ${ARGN})
  if(TITANIUM_FUZZ)
    add_executable(fuzz_${name} ${source})
    target_link_libraries(fuzz_${name} PRIVATE ${ARG_LIBS})
    target_link_options(fuzz_${name} PRIVATE -fsanitize=fuzzer)
  endif()
endfunction()
