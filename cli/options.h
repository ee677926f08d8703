// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/options.h -- options that several commands have, and option kinds whose complaints read as all others here do:
// "<rule>: got <x> (<where>)".
#pragma once
#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "sievemla/backend.h"

namespace sievemla::cli {

// A command of the program: adds its subcommand and options to `app`, and returns what to do once they are parsed; that
// returns an Exit.
using Action = std::function<int()>;
Action add_run(CLI::App& app);
Action add_replay(CLI::App& app);
Action add_info(CLI::App& app);
Action add_verify(CLI::App& app);
Action add_bench(CLI::App& app);
Action add_doctor(CLI::App& app);

// The whole of `text` as a decimal integer in [min, max]; else InvalidArgument that names `what` and the command.
std::int64_t parse_integer(std::string_view text, std::int64_t min, std::int64_t max, const std::string& what,
                           const std::string& where);

// An option that takes such an integer. `value` holds the default.
CLI::Option* add_integer(CLI::App& command, const std::string& names, std::int64_t& value, std::int64_t min,
                         std::int64_t max, const std::string& help);

// An option that takes one of `choices`. `value` holds the default; empty = depends, and `help` says on what.
CLI::Option* add_choice(CLI::App& command, const std::string& names, std::string& value,
                        const std::vector<std::string>& choices, const std::string& help);

// --threads, and the CpuOptions it stands for.
CLI::Option* add_threads(CLI::App& command, std::int64_t& threads);
void check_threads(std::int64_t threads, const std::string& where);
CpuOptions cpu_options(std::int64_t threads);

// --backend, and the backends it stands for: "all" = reference, cpu, and cuda where there is a device.
CLI::Option* add_backend(CLI::App& command, std::string& backend, const std::string& help);
std::vector<Backend> backends_named(const std::string& name, CpuOptions options);

}  // namespace sievemla::cli
