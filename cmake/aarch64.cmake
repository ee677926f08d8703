# SPDX-License-Identifier: Apache-2.0
# Copyright The SieveMLA authors
# Toolchain file: builds for 64-bit Arm on another machine, and runs what it built under qemu-user.
# `./dev test --aarch64` unpacks Debian's arm64 packages of the tests' libraries into build/aarch64/root. It leaves out
# what asks for the machine's speed (DeadlineDeathTest, Soak) or limits its memory, the emulator's too
# (AddressesThatRunOut), and what tests the checks themselves, in minutes and alike everywhere (CatchesBroken, Mistake).
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH ${CMAKE_CURRENT_LIST_DIR}/../build/aarch64/root)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
