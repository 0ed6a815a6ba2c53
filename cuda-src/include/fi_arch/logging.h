// Stands in for FlashInfer's logging.h while a module is built: the same macros, without spdlog and fmt, whose templates cost
// each front end more than all else that the module includes. Host code alone; kernels do not log.
//
// What is logged goes to stdout, as spdlog's default logger does: the level and the message, from `info` on. A message is a text in
// which each `{}` stands for the next value.
#ifndef FLASHINFER_LOGGING_H_
#define FLASHINFER_LOGGING_H_

// Headers that the modules use and that reached them through spdlog.
#include <array>
#include <memory>
#include <sstream>
#include <string>

#include <cstdio>

namespace fi_arch {
namespace logging {

inline void put(char const* text) { std::fputs(text, stdout); }
inline void put(std::string const& text) { std::fputs(text.c_str(), stdout); }
inline void put(bool value) { std::fputs(value ? "true" : "false", stdout); }
inline void put(char value) { std::fputc(value, stdout); }
inline void put(int value) { std::printf("%d", value); }
inline void put(unsigned value) { std::printf("%u", value); }
inline void put(long value) { std::printf("%ld", value); }
inline void put(unsigned long value) { std::printf("%lu", value); }
inline void put(long long value) { std::printf("%lld", value); }
inline void put(unsigned long long value) { std::printf("%llu", value); }
inline void put(double value) { std::printf("%g", value); }
inline void put(void const* value) { std::printf("%p", value); }

inline void message(char const* text) { std::fputs(text, stdout); }

template <typename First, typename... Rest>
void message(char const* text, First const& first, Rest const&... rest) {
  for (; *text != '\0'; ++text) {
    if (text[0] == '{' && text[1] == '}') {
      put(first);
      message(text + 2, rest...);
      return;
    }
    std::fputc(*text, stdout);
  }
}

template <typename... Values>
void line(char const* level, char const* text, Values const&... values) {
  std::printf("[%s] ", level);
  message(text, values...);
  std::fputc('\n', stdout);
}

// Compiled, so that a wrong call is an error, and never run.
template <typename... Values>
void silent(char const*, Values const&...) {}

}  // namespace logging
}  // namespace fi_arch

#define FLASHINFER_LOG_TRACE(...) ::fi_arch::logging::silent(__VA_ARGS__)
#define FLASHINFER_LOG_DEBUG(...) ::fi_arch::logging::silent(__VA_ARGS__)
#define FLASHINFER_LOG_INFO(...) ::fi_arch::logging::line("info", __VA_ARGS__)
#define FLASHINFER_LOG_WARN(...) ::fi_arch::logging::line("warning", __VA_ARGS__)
#define FLASHINFER_LOG_ERROR(...) ::fi_arch::logging::line("error", __VA_ARGS__)
#define FLASHINFER_LOG_CRITICAL(...) ::fi_arch::logging::line("critical", __VA_ARGS__)

#endif  // FLASHINFER_LOGGING_H_
