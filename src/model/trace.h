// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/model/trace.h -- one call of a stage in a file: inputs, and what should come out. The form of test vectors and of
// bug reports.
//
// A trace is a safetensors file whose __metadata__.kind says which call it is; without that its tensors say so. Tensors
// beside those named here are ignored. T rows, H heads, K lanes of top-k, N slots, R requests.
//
//   sparse_mla_trace                                    indexer_trace
//     q             BF16 | F32 [T, H, latent + rope]      q            U8 (e4m3) | BF16 | F32 [T, H, 128]
//     indices       I32 | I64 [T, K]                      weights      F32 [T, H]
//     topk_length   I32 [T], optional                     k_pages      U8 [pages, P * 132], BF16 | F32 [.., P * 128]
//     softmax_scale F32 [1]                               block_table  I32 [R, M]
//     sink          F32 [H], optional                     context_lens I32 [R]
//     kv_NAME       one or more caches, see below         row_request  I32 [T], optional: rows are dealt evenly
//     out_NAME      F32 [T, H, latent], optional          row_lens     I32 [T]
//     lse_NAME      F32 [T, H], optional                  logits       F32 [T, W], optional, W >= every row_lens
//                                                         topk, topk_slots  I32 [T, K], optional
//   metadata: latent (512), rope (what is left of q)      metadata: page_size (P), topk (K where no tensor has it)
//   cache rows: BF16 | F32 [N, latent + rope] ·
//     U8 [N, 656] fp8_ds_mla · U8 [N, 528], or [N, 656] with rope 0, fp8_nope
//
// Example files with every tensor explained: tests/golden/README.md.
#pragma once
#include <filesystem>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "model/safetensors.h"
#include "sievemla/kv_format.h"

namespace sievemla::model {

struct SparseMlaTrace {
  struct Cache {
    std::string name;     // "bf16" of kv_bf16
    KvCache kv;           // pages of one row: a slot list knows no pages
    TensorView out, lse;  // absent: nothing to compare with
  };
  TensorView q, indices, topk_length, sink;
  float scale = 0;
  int latent = 0, rope = 0;
  std::vector<Cache> caches;  // at least one

  // Lanes that select a row, over all of T.
  std::int64_t selected(const Cache& cache) const;
};

struct IndexerTrace {
  TensorView q, weights;
  IndexCache keys;
  TensorView block_table, row_request, row_lens;
  std::int64_t width = 0;  // columns of logits: the longest context where the trace has none
  std::int64_t k = 0;
  TensorView logits, topk, topk_slots;  // absent: nothing to compare with

  // Keys seen, over all of T.
  std::int64_t visible() const;
};

struct Trace {
  std::unique_ptr<SafeTensors> file;  // keeps the views alive
  std::variant<SparseMlaTrace, IndexerTrace> call;
};

// Every tensor's dtype and shape, and every number that something is addressed by, is checked: BadFile.
Trace load_trace(const std::filesystem::path& path);
Trace read_trace(std::unique_ptr<SafeTensors> file);

}  // namespace sievemla::model
