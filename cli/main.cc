// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// cli/main.cc -- the sievemla program: picks the command, and turns what it throws into one line and an exit status.
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdio>
#include <exception>
#include <new>
#include <stdexcept>

#include "cli/options.h"
#include "cli/output.h"
#include "sievemla/error.h"

namespace sievemla::cli {
namespace {

constexpr const char* kExits = R"(exit status
  0  good
  1  a check failed: a result is not what it should be
  2  wrong use, a bad file, or a request that no kernel here serves
  3  the device refused, memory ran out, or this program has a defect
Every failure is one line on stderr: sievemla: <rule>: got <what> (<where>).)";

constexpr const char* kNoMemory = "memory must suffice for the request: got an allocation that failed (host)";

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
  const std::string what = error.what();
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error)) {  // "--threads: 1 required N missing", "… received 2"
    const std::string option = what.substr(0, what.find(':'));
    const std::size_t received = what.find("received ");
    return received == what.npos
               ? InvalidArgument(error_message(option + " must have a value", where, "none"))
               : InvalidArgument(error_message(option + " must be given once", where, what.substr(received + 9)));
  }
  if (dynamic_cast<const CLI::RequiredError*>(&error)) return InvalidArgument(error_message(what, where, "none"));
  return InvalidArgument(error_message("arguments must be as --help says", where, what));
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
  for (const auto add : {add_run, add_replay, add_verify, add_bench, add_doctor, add_info}) {
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
    return fail(kDevice, kNoMemory);
  } catch (const std::length_error&) {  // a container beyond all memory there can be
    return fail(kDevice, kNoMemory);
  } catch (const Error& error) {
    return fail(kWrongUse, error.what());
  } catch (const std::exception& error) {
    return fail(kDevice,
                error_message("this program must not fail so: please report it", "an internal error", error.what()));
  }
}

// Weights and traces are mapped: what another process cuts off such a file is a bus error for whoever reads it.
void explain_bus_errors() {
  struct sigaction action{};
  action.sa_flags = SA_SIGINFO;
  action.sa_sigaction = [](int, siginfo_t* fault, void*) {
    constexpr char kLine[] = "sievemla: a file must not shrink while it is read: got a bus error (a mapped file)\n";
    if (fault->si_code != BUS_ADRERR) {  // to end as it would have without us
      std::signal(SIGBUS, SIG_DFL);
      return;
    }
    static std::atomic_flag said = ATOMIC_FLAG_INIT;
    while (said.test_and_set()) pause();  // every worker reads the file, and one speaks
    static_cast<void>(!write(STDERR_FILENO, kLine, sizeof kLine - 1));
    _exit(kWrongUse);
  };
  sigaction(SIGBUS, &action, nullptr);
}

}  // namespace
}  // namespace sievemla::cli

int main(int argc, char** argv) {
  sievemla::cli::prepare_streams();
  sievemla::cli::explain_bus_errors();
  return sievemla::cli::guarded(argc, argv);
}
