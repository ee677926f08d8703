// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/support/cuda_stream.h -- CUDA streams and graphs.
#pragma once
#include "support/cuda_memory.h"

namespace sievemla::test {

class Graph {
 public:
  template <class F>
  explicit Graph(cudaStream_t stream, F&& launches) {
    cudaGraph_t graph = nullptr;
    cuda_good(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));  // allocating or waiting would fail
    launches();
    cuda_good(cudaStreamEndCapture(stream, &graph));
    cuda_good(cudaGraphInstantiate(&run_, graph, 0));
    cuda_good(cudaGraphDestroy(graph));
  }
  Graph(const Graph&) = delete;
  ~Graph() { cudaGraphExecDestroy(run_); }
  void replay(cudaStream_t stream) const { cuda_good(cudaGraphLaunch(run_, stream)); }

 private:
  cudaGraphExec_t run_ = nullptr;
};

struct OwnStream {
  cudaStream_t handle = nullptr;
  OwnStream() { cuda_good(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking)); }
  OwnStream(const OwnStream&) = delete;
  ~OwnStream() { cudaStreamDestroy(handle); }
  void wait() const { cuda_good(cudaStreamSynchronize(handle)); }
};

}  // namespace sievemla::test
