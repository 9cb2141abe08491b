# The kernels' native test program, part of the target swapio_native_tests. It is built from the
# module's own objects: no binding, so no Python.
include(CTest)
if(NOT TARGET swapio_native_tests)
  add_custom_target(swapio_native_tests)
endif()
add_executable(kernels_levels_test ${CMAKE_CURRENT_LIST_DIR}/levels_test.cpp
  $<TARGET_OBJECTS:swapio_kernels>)
target_link_libraries(kernels_levels_test PRIVATE swapio_warnings Threads::Threads)
add_test(NAME kernels_levels COMMAND kernels_levels_test)
set_tests_properties(kernels_levels PROPERTIES TIMEOUT 600)
add_dependencies(swapio_native_tests kernels_levels_test)
