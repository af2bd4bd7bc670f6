find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(GTest REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8)

# libtorch out of the wheel, as imported targets of our own: its find_package wants a CUDA toolkit.
if(TITANIUM_TORCH)
  set(torch_root ${TITANIUM_DEPS}/torch)
  if(NOT EXISTS ${torch_root}/include/ATen/ATen.h)
    message(FATAL_ERROR "torch not found in ${TITANIUM_DEPS}: run `make setup`, or give -DTITANIUM_DEPS=<folder>")
  endif()
  add_library(titanium_torch INTERFACE)
  # After the system's headers: the wheel carries an fmt of its own, which libfmt would not link with.
  target_compile_options(titanium_torch INTERFACE -fopenmp "SHELL:-idirafter ${torch_root}/include"
    "SHELL:-idirafter ${torch_root}/include/torch/csrc/api/include")
  target_link_libraries(titanium_torch INTERFACE ${torch_root}/lib/libtorch_cpu.so ${torch_root}/lib/libc10.so
    ${torch_root}/lib/libgomp.so.1 Threads::Threads)
  target_link_options(titanium_torch INTERFACE
    -Wl,-rpath,${torch_root}/lib -Wl,-rpath-link,${torch_root}/lib
    -Wl,-rpath-link,${TITANIUM_DEPS}/nvidia/cu13/lib -Wl,--allow-shlib-undefined -Wl,--as-needed)

  if(TITANIUM_CUDA)
    if(EXISTS ${torch_root}/lib/libtorch_cuda.so)
      # Nothing names a symbol of it: it registers the device's kernels when it is loaded.
      target_link_options(titanium_torch INTERFACE -Wl,--no-as-needed)
      target_link_libraries(titanium_torch INTERFACE ${torch_root}/lib/libtorch_cuda.so ${torch_root}/lib/libc10_cuda.so)
    else()
      message(STATUS "cuda: ${torch_root}/lib has no libtorch_cuda.so: this build is for the CPU")
    endif()
  endif()

  add_library(titanium_pch STATIC ${CMAKE_SOURCE_DIR}/cmake/pch.cpp)
  target_link_libraries(titanium_pch PUBLIC titanium_flags titanium_torch fmt::fmt nlohmann_json::nlohmann_json)
  target_precompile_headers(titanium_pch PRIVATE <ATen/ATen.h> <ATen/Parallel.h>
    <torch/csrc/autograd/custom_function.h> <torch/csrc/autograd/autograd.h> <fmt/format.h>
    <map> <memory> <string> <vector> <functional>)
endif()
