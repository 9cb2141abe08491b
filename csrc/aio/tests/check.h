// SPDX-License-Identifier: Apache-2.0
// A test is a function; CHECK says what was expected and ends the program.
#ifndef SWAPIO_TESTS_CHECK_H_
#define SWAPIO_TESTS_CHECK_H_

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)

#define CHECK_EQUAL(left, right)                                                           \
  do {                                                                                     \
    const auto left_value = static_cast<long long>(left);                                  \
    const auto right_value = static_cast<long long>(right);                                \
    if (left_value != right_value) {                                                       \
      std::fprintf(stderr, "%s:%d: %s is %lld, not %s, %lld\n", __FILE__, __LINE__, #left, \
                   left_value, #right, right_value);                                       \
      std::abort();                                                                        \
    }                                                                                      \
  } while (false)

namespace swapio {

using NamedTest = std::pair<std::string, std::function<void()>>;

// Runs those whose name contains the first argument, or all.
inline int run_tests(const std::vector<NamedTest>& tests, int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  for (const NamedTest& test : tests) {
    if (test.first.find(filter) == std::string::npos) continue;
    std::fprintf(stderr, "%s\n", test.first.c_str());
    test.second();
  }
  return 0;
}

}  // namespace swapio

#endif  // SWAPIO_TESTS_CHECK_H_
