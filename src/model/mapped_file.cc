// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/model/mapped_file.cc -- files in memory, mapped or read.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "model/safetensors.h"
#include "sievemla/error.h"

namespace sievemla::model {

namespace {

[[noreturn]] void unreadable(const std::filesystem::path& path, int reason) {
  if (reason == ENOMEM) throw std::bad_alloc();
  throw BadFile(error_message("the file must be readable", path.string(), std::strerror(reason)));
}

// A regular file, open for reading.
class OpenFile {
 public:
  explicit OpenFile(const std::filesystem::path& path)
      // Non-blocking: opening a pipe must not wait for a writer.
      : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
    if (fd_ < 0) unreadable(path, errno);
    struct ::stat status{};
    if (::fstat(fd_, &status) == 0 && S_ISREG(status.st_mode)) {
      size_ = static_cast<std::size_t>(status.st_size);
      return;
    }
    ::close(fd_);
    throw BadFile(error_message("a regular file is needed", path.string(),
                                S_ISDIR(status.st_mode) ? "a directory" : "something else"));
  }
  OpenFile(const OpenFile&) = delete;
  ~OpenFile() { ::close(fd_); }
  int fd() const { return fd_; }
  std::size_t size() const { return size_; }

 private:
  int fd_;
  std::size_t size_ = 0;
};

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& path) {
  const OpenFile file(path);
  if (file.size() == 0) return;
  void* const data = ::mmap(nullptr, file.size(), PROT_READ, MAP_PRIVATE, file.fd(), 0);
  if (data == MAP_FAILED) unreadable(path, errno);
  data_ = data;
  size_ = file.size();
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile::~MappedFile() {
  if (data_) ::munmap(data_, size_);
}

std::string read_file(const std::filesystem::path& path, std::size_t most) {
  const OpenFile file(path);
  std::string bytes(std::min(file.size(), most), '\0');
  std::size_t have = 0;
  while (have < bytes.size()) {
    const ::ssize_t n = ::read(file.fd(), bytes.data() + have, bytes.size() - have);
    if (n < 0 && errno != EINTR) unreadable(path, errno);
    if (n == 0) bytes.resize(have);
    if (n > 0) have += static_cast<std::size_t>(n);
  }
  return bytes;
}

}  // namespace sievemla::model
