// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/main.cc -- the sievemla program: picks the command, and turns what it throws into one line and an exit status.
#include <cstdio>
#include <exception>
#include <new>

#include "cli/options.h"
#include "cli/output.h"
#include "sievemla/error.h"

namespace sievemla::cli {
namespace {

constexpr const char* kExits = R"(exit status
  0  good
  1  a check failed: a result is not what it should be
  2  wrong use, a bad file, or a request that no kernel here serves
  3  the device refused, or memory ran out
Every failure is one line on stderr: sievemla: <rule>: got <what> (<where>).)";

struct Command {
  CLI::App* app;
  Action action;
};

// The subcommand that was named, or the program itself.
CLI::App& innermost(CLI::App& program) {
  const auto named = program.get_subcommands();
  return named.empty() ? program : *named.front();
}

// What CLI11 found wrong, said as everything else here is.
InvalidArgument wrong_use(CLI::App& program, const CLI::ParseError& error) {
  const CLI::App& at = innermost(program);
  const std::string& where = at.get_name();
  if (dynamic_cast<const CLI::ExtrasError*>(&error)) {
    std::string extras;
    for (const std::string& extra : program.remaining(true)) extras += (extras.empty() ? "'" : " '") + extra + "'";
    if (&at == &program)
      return InvalidArgument(error_message("the first argument is a command, see sievemla --help", where, extras));
    return InvalidArgument(
        error_message("an argument must be one that sievemla " + where + " --help lists", where, extras));
  }
  if (dynamic_cast<const CLI::RequiredError*>(&error))
    return InvalidArgument(error_message(error.what(), where, "none"));
  return InvalidArgument(error_message("arguments must be as --help says", where, error.what()));
}

int run_program(int argc, char** argv) {
  CLI::App program("Sparse MLA attention (DSA): indexer, exact top-k, attention over the selected cache rows, combine.",
                   "sievemla");
  program.footer(kExits);
  program.require_subcommand(0, 1);
  program.set_help_flag("-h,--help", "Print this help and exit");
  program.set_version_flag("--version", fmt::format("sievemla {} ({})", version(), commit()),
                           "Print the version and exit");

  std::vector<Command> commands;
  for (const auto add : {add_run, add_replay, add_verify, add_bench, add_info}) {
    Action action = add(program);
    commands.push_back({program.get_subcommands({}).back(), std::move(action)});
  }

  try {
    program.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    print(program.help());  // the named command's, if one is named
    return kGood;
  } catch (const CLI::CallForVersion& version) {
    print("{}\n", version.what());
    return kGood;
  } catch (const CLI::ParseError& error) {
    throw wrong_use(program, error);
  }

  for (const Command& command : commands)
    if (command.app->parsed()) return command.action();
  print(program.help());
  throw InvalidArgument(error_message("the first argument is a command", program.get_name(), "none"));
}

// The exit status, after everything was said.
int guarded(int argc, char** argv) {
  const auto fail = [](Exit exit, std::string_view message) {
    std::fflush(stdout);  // what there is of the results comes first
    complain(message);
    return exit;
  };
  try {
    const int exit = run_program(argc, argv);
    flush();
    return exit;
  } catch (const CheckFailed& error) {
    return fail(kCheckFailed, error.what());
  } catch (const DeviceError& error) {
    return fail(kDevice, error.what());
  } catch (const std::bad_alloc&) {
    return fail(kDevice, error_message("memory must suffice for the request", "host", "an allocation that failed"));
  } catch (const std::exception& error) {
    return fail(kWrongUse, error.what());
  }
}

}  // namespace
}  // namespace sievemla::cli

int main(int argc, char** argv) {
  sievemla::cli::prepare_streams();
  return sievemla::cli::guarded(argc, argv);
}
