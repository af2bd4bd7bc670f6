# Which of the transports that need c10d are built; sets c10d_sources.  c10d's headers name Gloo's (libgloo-dev); its code is in libtorch.
find_path(GLOO_INCLUDE gloo/rendezvous/store.h)
if(GLOO_INCLUDE AND EXISTS ${torch_root}/include/torch/csrc/distributed/c10d/ProcessGroupGloo.hpp)
  set(c10d_sources gloo.cpp)
  set_source_files_properties(gloo.cpp PROPERTIES SKIP_PRECOMPILE_HEADERS ON
    COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO" COMPILE_OPTIONS "-idirafter;${GLOO_INCLUDE}")
else()
  message(STATUS "gloo: gloo/rendezvous/store.h not found (libgloo-dev): comm.transport gloo will be refused")
  set(c10d_sources no_gloo.cpp)
endif()
