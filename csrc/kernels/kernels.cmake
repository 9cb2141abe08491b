# swapio._kernels: one kernel source, one object per instruction set, chosen at run time.
find_package(pybind11 CONFIG REQUIRED)
find_path(SWAPIO_XXHASH_INCLUDE xxhash.h)

set(SWAPIO_KERNELS_DIR ${CMAKE_CURRENT_LIST_DIR})
set(kernels ${CMAKE_CURRENT_LIST_DIR})
add_library(swapio_kernels OBJECT
  ${kernels}/adam_spans.cpp ${kernels}/data_spans.cpp ${kernels}/dispatch.cpp ${kernels}/pool.cpp
  ${kernels}/symmetric.cpp ${kernels}/isa_scalar.cpp)
set_target_properties(swapio_kernels PROPERTIES POSITION_INDEPENDENT_CODE ON)
target_include_directories(swapio_kernels PRIVATE ${kernels})
target_link_libraries(swapio_kernels PRIVATE Threads::Threads swapio_warnings)
# No contraction: every level must round as the scalar one does. No errno from sqrt: with it the
# compiler cannot vectorise around the call.
target_compile_options(swapio_kernels PRIVATE -ffp-contract=off -fno-math-errno)
if(SWAPIO_SANITIZE AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # Checks as calls and line tables only: the inlined kernels compile four times faster.
  target_compile_options(swapio_kernels PRIVATE
    -g1 --param=asan-instrumentation-with-call-threshold=0)
endif()
set(hash_sources ${kernels}/hash_generic.c)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(avx2_flags -mavx2 -mf16c)
  set(avx512_flags -mavx2 -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # GCC 12's own avx512fintrin.h trips these (its bug 105593).
    list(APPEND avx512_flags -Wno-uninitialized -Wno-maybe-uninitialized)
  endif()
  if(SWAPIO_SANITIZE)
    # The scalar object has the same source with UBSan; in the wide ones it costs minutes of compile.
    list(APPEND avx2_flags -fno-sanitize=undefined)
    list(APPEND avx512_flags -fno-sanitize=undefined)
  endif()
  target_sources(swapio_kernels PRIVATE ${kernels}/isa_avx2.cpp ${kernels}/isa_avx512.cpp)
  set_source_files_properties(${kernels}/isa_avx2.cpp ${kernels}/hash_avx2.c
    PROPERTIES COMPILE_OPTIONS "${avx2_flags}")
  set_source_files_properties(${kernels}/isa_avx512.cpp ${kernels}/hash_avx512.c
    PROPERTIES COMPILE_OPTIONS "${avx512_flags}")
  # Matrix products use fused multiply-adds, and say so with intrinsics: no contraction elsewhere.
  target_sources(swapio_kernels PRIVATE
    ${kernels}/symmetric_avx2.cpp ${kernels}/symmetric_avx512.cpp)
  set_source_files_properties(${kernels}/symmetric_avx2.cpp
    PROPERTIES COMPILE_OPTIONS "${avx2_flags};-mfma")
  set_source_files_properties(${kernels}/symmetric_avx512.cpp
    PROPERTIES COMPILE_OPTIONS "${avx512_flags};-mfma")
  target_compile_definitions(swapio_kernels PRIVATE SWAPIO_HAVE_X86=1)
  list(APPEND hash_sources ${kernels}/hash_avx2.c ${kernels}/hash_avx512.c)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64")
  target_sources(swapio_kernels PRIVATE ${kernels}/isa_neon.cpp)
  target_compile_definitions(swapio_kernels PRIVATE SWAPIO_HAVE_NEON=1)
endif()

python_add_library(_kernels MODULE WITH_SOABI
  ${kernels}/binding.cpp ${kernels}/tensors.cpp $<TARGET_OBJECTS:swapio_kernels>)
target_include_directories(_kernels PRIVATE ${kernels})
target_link_libraries(_kernels PRIVATE pybind11::headers Threads::Threads swapio_warnings)

if(SWAPIO_XXHASH_INCLUDE)
  target_sources(swapio_kernels PRIVATE ${hash_sources})
  set_property(SOURCE ${hash_sources} APPEND PROPERTY
    INCLUDE_DIRECTORIES ${SWAPIO_XXHASH_INCLUDE})
  target_compile_definitions(swapio_kernels PRIVATE SWAPIO_HAVE_XXH3=1)
  target_compile_definitions(_kernels PRIVATE SWAPIO_XXH3_FOUND=1)
else()
  message(STATUS "xxhash.h not found (Debian: libxxhash-dev): swapio hashes with the xxhash wheel")
  target_compile_definitions(_kernels PRIVATE SWAPIO_XXH3_FOUND=0)
endif()
install(TARGETS _kernels DESTINATION swapio)

if(SWAPIO_NATIVE_TESTS)
  include(${kernels}/tests/tests.cmake)
endif()
