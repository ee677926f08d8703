// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/model/mapped_file.cc -- a file in memory, read-only.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "model/safetensors.h"
#include "sievemla/error.h"

namespace sievemla::model {

MappedFile::MappedFile(const std::filesystem::path& path) {
  // Non-blocking: opening a pipe must not wait for a writer.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) throw BadFile(error_message("the file must be readable", path.string(), std::strerror(errno)));
  struct ::stat status {};
  const bool regular = ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
  if (regular && status.st_size > 0)
    data_ = ::mmap(nullptr, static_cast<std::size_t>(status.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
  const int reason = errno;
  ::close(fd);
  if (!regular)
    throw BadFile(error_message("a regular file is needed", path.string(),
                                S_ISDIR(status.st_mode) ? "a directory" : "something else"));
  if (data_ == MAP_FAILED) {
    data_ = nullptr;
    throw BadFile(error_message("the file must be readable", path.string(), std::strerror(reason)));
  }
  size_ = static_cast<std::size_t>(status.st_size);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile::~MappedFile() {
  if (data_) ::munmap(data_, size_);
}

}  // namespace sievemla::model
