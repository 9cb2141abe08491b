# swapio._aio: the C++ engine behind a C ABI, and its generated cffi module (API mode).
set(SWAPIO_AIO_DIR ${CMAKE_CURRENT_LIST_DIR})

# liburing is linked statically where a static library is there, so that a wheel needs no system
# package. It is optional: without it the thread engine is built alone, and `swapio info` says so.
if(SWAPIO_URING)
  find_package(PkgConfig QUIET)
  if(PkgConfig_FOUND)
    pkg_check_modules(PC_URING QUIET liburing)
  endif()
  find_path(URING_INCLUDE_DIR liburing.h HINTS ${PC_URING_INCLUDE_DIRS})
  find_library(URING_LIBRARY NAMES liburing.a uring HINTS ${PC_URING_LIBRARY_DIRS})
  if(URING_INCLUDE_DIR AND URING_LIBRARY)
    # Registered-buffer tables and DEFER_TASKRUN arrived in 2.3.
    include(CheckCXXSourceCompiles)
    set(CMAKE_REQUIRED_INCLUDES ${URING_INCLUDE_DIR})
    set(CMAKE_REQUIRED_LIBRARIES ${URING_LIBRARY})
    check_cxx_source_compiles("
      #include <liburing.h>
      int main() {
        io_uring ring;
        return io_uring_queue_init(4, &ring, IORING_SETUP_DEFER_TASKRUN) +
               io_uring_register_buffers_sparse(&ring, 4);
      }" SWAPIO_URING_IS_USABLE)
    unset(CMAKE_REQUIRED_INCLUDES)
    unset(CMAKE_REQUIRED_LIBRARIES)
  endif()
  if(SWAPIO_URING_IS_USABLE)
    message(STATUS "swapio: io_uring engine with ${URING_LIBRARY}")
  else()
    message(STATUS "swapio: liburing >= 2.3 not found, building the thread engine only "
                   "(install liburing-dev and build again to get io_uring)")
  endif()
endif()

set(SWAPIO_AIO_SOURCES
  ${SWAPIO_AIO_DIR}/c_api.cpp
  ${SWAPIO_AIO_DIR}/core.cpp
  ${SWAPIO_AIO_DIR}/core_transfer.cpp
  ${SWAPIO_AIO_DIR}/perform.cpp
  ${SWAPIO_AIO_DIR}/backend_threads.cpp)

function(swapio_configure_aio target)
  target_include_directories(${target} PRIVATE ${SWAPIO_AIO_DIR})
  target_link_libraries(${target} PRIVATE Threads::Threads)
  if(SWAPIO_URING AND SWAPIO_URING_IS_USABLE)
    target_sources(${target} PRIVATE ${SWAPIO_AIO_DIR}/backend_uring.cpp)
    target_include_directories(${target} SYSTEM PRIVATE ${URING_INCLUDE_DIR})
    target_compile_definitions(${target} PRIVATE SWAPIO_HAVE_URING=1)
    target_link_libraries(${target} PRIVATE ${URING_LIBRARY})
  else()
    target_sources(${target} PRIVATE ${SWAPIO_AIO_DIR}/uring_missing.cpp)
  endif()
endfunction()

add_library(swapio_aio OBJECT ${SWAPIO_AIO_SOURCES})
set_target_properties(swapio_aio PROPERTIES POSITION_INDEPENDENT_CODE ON)
target_link_libraries(swapio_aio PRIVATE swapio_warnings)
swapio_configure_aio(swapio_aio)

add_custom_command(
  OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/_aio.c
  COMMAND Python::Interpreter -m cffi.gen_src read-sources swapio._aio
          ${SWAPIO_AIO_DIR}/aio.cdef.h ${SWAPIO_AIO_DIR}/aio.h ${CMAKE_CURRENT_BINARY_DIR}/_aio.c
  DEPENDS ${SWAPIO_AIO_DIR}/aio.cdef.h ${SWAPIO_AIO_DIR}/aio.h
  VERBATIM)
# The generated file is not held to our warnings.
python_add_library(_aio MODULE ${CMAKE_CURRENT_BINARY_DIR}/_aio.c $<TARGET_OBJECTS:swapio_aio>
                   WITH_SOABI)
target_include_directories(_aio PRIVATE ${SWAPIO_AIO_DIR})
target_link_libraries(_aio PRIVATE Threads::Threads)
if(SWAPIO_URING AND SWAPIO_URING_IS_USABLE)
  target_link_libraries(_aio PRIVATE ${URING_LIBRARY})
endif()
set_target_properties(_aio PROPERTIES LINKER_LANGUAGE CXX)
target_link_options(_aio PRIVATE -Wl,--exclude-libs,ALL)
install(TARGETS _aio DESTINATION swapio)

if(SWAPIO_NATIVE_TESTS)
  include(${SWAPIO_AIO_DIR}/tests/tests.cmake)
endif()
