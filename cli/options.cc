// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
#include "cli/options.h"

#include <algorithm>
#include <charconv>
#include <thread>

#include "cuda/device.h"
#include "sievemla/error.h"

namespace sievemla::cli {

std::int64_t parse_integer(std::string_view text, std::int64_t min, std::int64_t max, const std::string& what,
                           const std::string& where) {
  std::int64_t value = 0;
  const auto [end, fault] = std::from_chars(text.data(), text.data() + text.size(), value);
  expects(fault == std::errc() && end == text.data() + text.size() && value >= min && value <= max,
          what + " must be a whole number from " + std::to_string(min) + " to " + std::to_string(max), where, "'", text,
          "'");
  return value;
}

CLI::Option* add_integer(CLI::App& command, const std::string& names, std::int64_t& value, std::int64_t min,
                         std::int64_t max, const std::string& help) {
  const std::string name = names.substr(0, names.find(','));
  return command
      .add_option_function<std::string>(
          names,
          [&value, min, max, name, where = command.get_name()](const std::string& text) {
            value = parse_integer(text, min, max, name, where);
          },
          help)
      ->type_name("N")
      ->default_str(std::to_string(value));
}

CLI::Option* add_choice(CLI::App& command, const std::string& names, std::string& value,
                        const std::vector<std::string>& choices, const std::string& help) {
  std::string list;
  for (const std::string& choice : choices) list += (list.empty() ? "" : ", ") + choice;
  std::string type = list;
  std::replace(type.begin(), type.end(), ' ', '|');
  type.erase(std::remove(type.begin(), type.end(), ','), type.end());
  return command
      .add_option_function<std::string>(
          names,
          [&value, names, choices, list, where = command.get_name()](const std::string& text) {
            expects(std::find(choices.begin(), choices.end(), text) != choices.end(), names + " is one of " + list,
                    where, "'", text, "'");
            value = text;
          },
          help)
      ->type_name(type)
      ->default_str(value);
}

CLI::Option* add_threads(CLI::App& command, std::int64_t& threads) {
  return add_integer(command, "--threads", threads, 0, 4096,
                     "Threads of the cpu backend; 0: OMP_NUM_THREADS, else all cores");
}

// A thread that the system refuses to OpenMP ends the process.
void check_threads(std::int64_t threads, const std::string& where) {
  const std::int64_t most = 64 * std::int64_t{std::max(1u, std::thread::hardware_concurrency())};
  expects(threads <= most, "there are at most 64 threads for each processor, here " + std::to_string(most), where,
          threads);
}
CpuOptions cpu_options(std::int64_t threads) {
  check_threads(threads, "--threads");
  return {static_cast<int>(threads), {}};
}

CLI::Option* add_backend(CLI::App& command, std::string& backend, const std::string& help) {
  return command.add_option("--backend", backend, help)->type_name("B")->default_str(backend);
}

std::vector<Backend> backends_named(const std::string& name, CpuOptions options) {
  if (name != "all") return {Backend::by_name(name, options)};
  std::vector<Backend> all = {Backend::reference(), Backend::cpu(options)};
  if (cuda::any_device()) all.push_back(Backend::cuda());
  return all;
}

}  // namespace sievemla::cli
