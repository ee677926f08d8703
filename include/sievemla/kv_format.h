// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// include/sievemla/kv_format.h -- what a cache row looks like: descriptors at run time, and views of whole caches.
//
// The byte maps are in src/kv/, one header per row type; docs/kv-formats.md draws them.
#pragma once
#include <cstdint>
#include <span>
#include <string_view>

#include "sievemla/tensor.h"

namespace sievemla {

// ---- latent cache: one row per token, latent | rope -------------------------------------------------

enum class KvFormat : std::uint8_t { f32, bf16, fp8_ds_mla, fp8_nope };

struct KvFormatInfo {
  KvFormat format;
  std::string_view name;    // as on the command line and in vLLM's --kv-cache-dtype
  DType storage;            // dtype of KvCache::pages: f32, bf16, or u8 for packed rows
  int latent;               // required latent width, 0 = any
  int rope;                 // required rope width, 0 = none, -1 = any
  int scale_group;          // latent elements that share one f32 scale, 0 = unscaled
  std::string_view source;  // where the format is defined
  std::int64_t row_bytes(int latent_width, int rope_width) const;
};

std::span<const KvFormatInfo> kv_formats();
const KvFormatInfo& info(KvFormat format);
KvFormat kv_format_by_name(std::string_view name);  // InvalidArgument lists the names there are

// A paged cache of latent rows. Row of slot s: page s / page_size, offset s % page_size; slots = pages * page_size.
struct KvCache {
  KvFormat format = KvFormat::bf16;
  int latent = 512;
  int rope = 64;     // 0: the row holds the latent alone (GLM-5.3-Flash)
  TensorView pages;  // [pages, page_size, row] of info(format).storage, row >= row elements (u8: row bytes). Any page
                     // and row stride: other layers' pages may lie between, rows may be padded (fp8_nope in 656 B
                     // rows).
  std::int64_t page_size() const { return pages.dim(1); }
  std::int64_t slots() const { return pages.dim(0) * pages.dim(1); }
};

// ---- indexer key cache: one key of 128 per token ----------------------------------------------------

inline constexpr int kIndexDim = 128;       // width of an indexer head and key
inline constexpr int kIndexKeyBytes = 132;  // fp8: 128 e4m3 + one f32 scale

enum class IndexFormat : std::uint8_t { f32, bf16, fp8 };
std::string_view name_of(IndexFormat format);
DType storage_of(IndexFormat format);                     // dtype of IndexCache::pages
IndexFormat index_format_by_name(std::string_view name);  // InvalidArgument lists the names there are

// A paged cache of indexer keys.
//   f32, bf16: pages [pages, page_size, 128]
//   fp8:       pages [pages, page_size, 132] u8. NOT per-token rows: a page is page_size * 128 bytes of e4m3 keys, then
//              page_size f32 scales (page_size * 4 bytes). The last two dims are contiguous, the page stride is free.
//              Source: DeepGEMM, vLLM and SGLang share this layout.
struct IndexCache {
  IndexFormat format = IndexFormat::fp8;
  TensorView pages;
  std::int64_t page_size() const { return pages.dim(1); }
  std::int64_t slots() const { return pages.dim(0) * pages.dim(1); }
};

// How a writer picks the f32 scale of a quantised group.
enum class ScaleRule : std::uint8_t {
  arbitrary,     // amax / 448
  power_of_two,  // the next power of two at or above that
  engine,        // amax / 448, and codes as kernels get them that divide in f32: vLLM's bytes, to the last bit
};

}  // namespace sievemla
