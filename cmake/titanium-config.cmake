# find_package(titanium) with -Dtitanium_DIR=<titanium's build folder>: titanium::engine, titanium::loss, ... (examples/CMakeLists.txt).
include(CMakeFindDependencyMacro)
find_dependency(Threads)
find_dependency(fmt)
find_dependency(nlohmann_json)
find_dependency(spdlog)
find_dependency(OpenSSL COMPONENTS Crypto)
find_dependency(PkgConfig)
pkg_check_modules(PCRE2 REQUIRED QUIET IMPORTED_TARGET libpcre2-8)
pkg_check_modules(UTF8PROC REQUIRED QUIET IMPORTED_TARGET libutf8proc)
include(${CMAKE_CURRENT_LIST_DIR}/titanium-targets.cmake)

# Warnings, and that they are errors, are for our own code.
get_target_property(flags titanium::flags INTERFACE_COMPILE_OPTIONS)
list(FILTER flags EXCLUDE REGEX "^-W|pch-preprocess|visibility")
set_target_properties(titanium::flags PROPERTIES INTERFACE_COMPILE_OPTIONS "${flags}" INTERFACE_COMPILE_FEATURES cxx_std_20)
