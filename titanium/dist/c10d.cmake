# Which of the transports that need c10d are built; sets c10d_sources.  c10d's code is in libtorch; its headers name those of Gloo
# (libgloo-dev) and of NCCL and CUDA.  Where they are missing a file of the same functions stands in and refuses.
set(c10d ${torch_root}/include/torch/csrc/distributed/c10d)
find_path(GLOO_INCLUDE gloo/rendezvous/store.h)
if(GLOO_INCLUDE AND EXISTS ${c10d}/ProcessGroupGloo.hpp)
  set(c10d_sources gloo.cpp)
  set_source_files_properties(gloo.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON
    COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO" COMPILE_OPTIONS "-idirafter;${GLOO_INCLUDE}")
else()
  message(STATUS "gloo: gloo/rendezvous/store.h not found (libgloo-dev): comm.transport gloo will be refused")
  set(c10d_sources no_gloo.cpp)
endif()

# Beside Gloo, by which its ranks meet; only with TITANIUM_CUDA.
if(TITANIUM_CUDA AND c10d_sources STREQUAL gloo.cpp)
  find_path(NCCL_INCLUDE nccl.h HINTS ${TITANIUM_DEPS}/nvidia/nccl/include)
  find_path(CUDA_INCLUDE cuda_runtime_api.h HINTS ${TITANIUM_DEPS}/nvidia/cu13/include /usr/local/cuda/include)
endif()
if(NCCL_INCLUDE AND CUDA_INCLUDE AND EXISTS ${torch_root}/lib/libtorch_cuda.so)
  list(APPEND c10d_sources nccl.cpp)
  set_source_files_properties(nccl.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON
    COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_NCCL" COMPILE_OPTIONS "-idirafter;${NCCL_INCLUDE};-idirafter;${CUDA_INCLUDE}")
else()
  list(APPEND c10d_sources no_nccl.cpp)
endif()
