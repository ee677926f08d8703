// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/attention/arguments_test.cc -- every rule about arguments has a call that breaks it; a bad call writes nothing.
#include <gtest/gtest.h>

#include "sievemla/error.h"
#include "support/attention_problem.h"
#include "support/backends.h"

namespace sievemla::test {
namespace {

constexpr std::int64_t kTooMany = 129;

struct BadCall {
  const char* name;
  const char* says;  // part of the message
  void (*spoil)(AttentionArgs&);
};

Slots& slots(AttentionArgs& args) { return std::get<Slots>(args.rows); }
template <int kDimension>
void shrink(TensorView& view) {
  --view.shape[kDimension];
}
const std::int32_t kNumbers[8] = {};
TensorView numbers(std::initializer_list<std::int64_t> shape) { return tensor(kNumbers, shape); }

const BadCall kBad[] = {
    {"q_absent", "attention: q", [](AttentionArgs& args) { args.q = {}; }},
    {"q_rank", "attention: q", [](AttentionArgs& args) { args.q.rank = 2; }},
    {"q_width", "[*, *, 576]", [](AttentionArgs& args) { shrink<2>(args.q); }},
    {"q_dtype", "bf16 or f32", [](AttentionArgs& args) { args.q.dtype = DType::i32; }},
    {"q_null", "must have data", [](AttentionArgs& args) { args.q.data = nullptr; }},
    {"q_negative_stride", "stride must not be negative", [](AttentionArgs& args) { args.q.stride[0] = -1; }},
    {"q_device", "device cpu",
     [](AttentionArgs& args) {
       args.q.device = {DeviceType::cuda, 0};
     }},
    {"q_packed_with_q_rope", "[*, *, 512]", [](AttentionArgs& args) { args.q_rope = args.q; }},
    {"q_rope_shape", "attention: q_rope",
     [](AttentionArgs& args) {
       args.q.shape[2] = 512;
       args.q_rope = args.q;
     }},
    {"q_rope_dtype", "attention: q_rope",
     [](AttentionArgs& args) {
       args.q.shape[2] = 512;
       args.q_rope = args.q;
       args.q_rope.shape[2] = 64;
       args.q_rope.dtype = DType::f32;
     }},
    {"no_heads", "heads must be 1 to 128",
     [](AttentionArgs& args) {
       for (TensorView* view : {&args.q, &args.out, &args.lse}) view->shape[1] = 0;
     }},
    {"too_many_heads", "heads must be 1 to 128: got 129",
     [](AttentionArgs& args) {
       for (TensorView* view : {&args.q, &args.out, &args.lse}) view->shape[1] = kTooMany, view->stride[1] = 0;
     }},
    {"kv_dtype", "attention: kv", [](AttentionArgs& args) { args.kv.pages.dtype = DType::u8; }},
    {"kv_row_too_short", "must hold a row of 576", [](AttentionArgs& args) { args.kv.pages.shape[2] = 575; }},
    {"kv_width", "[*, *, 577]",
     [](AttentionArgs& args) {
       args.kv.rope = 65;
       args.kv.pages.shape[2] = args.kv.pages.stride[1] = 577;
     }},
    {"kv_absent", "attention: kv", [](AttentionArgs& args) { args.kv.pages = {}; }},
    {"indices_absent", "attention: rows.indices", [](AttentionArgs& args) { args.rows = Slots{}; }},
    {"indices_dtype", "i32 or i64", [](AttentionArgs& args) { slots(args).indices.dtype = DType::f32; }},
    {"indices_tokens", "attention: rows.indices", [](AttentionArgs& args) { shrink<0>(slots(args).indices); }},
    {"indices_folded", "requests * q_len",
     [](AttentionArgs& args) {
       slots(args).indices = numbers({1, 1, 3});
     }},
    {"indices_folded_q_len_0", "requests * q_len",
     [](AttentionArgs& args) {
       slots(args).indices = numbers({2, 0, 3});
     }},
    {"indices_rank", "attention: rows.indices", [](AttentionArgs& args) { slots(args).indices.rank = 1; }},
    {"topk_length_shape", "rows.topk_length", [](AttentionArgs& args) { slots(args).topk_length = numbers({1}); }},
    {"topk_length_dtype", "rows.topk_length",
     [](AttentionArgs& args) {
       slots(args).topk_length = numbers({2});
       slots(args).topk_length.dtype = DType::i64;
     }},
    {"table_absent", "rows.table",
     [](AttentionArgs& args) {
       args.rows = BlockTable{{}, numbers({1})};
     }},
    {"table_i64", "rows.table",
     [](AttentionArgs& args) {
       TensorView table = numbers({1, 2});
       table.dtype = DType::i64;
       args.rows = BlockTable{table, numbers({1})};
     }},
    {"no_requests", "requests * q_len",
     [](AttentionArgs& args) {
       args.rows = BlockTable{numbers({0, 2}), numbers({0})};
     }},
    {"tokens_not_dealt_evenly", "2 tokens, 3 requests",
     [](AttentionArgs& args) {
       args.rows = BlockTable{numbers({3, 2}), numbers({3})};
     }},
    {"lengths_shape", "rows.lengths",
     [](AttentionArgs& args) {
       args.rows = BlockTable{numbers({1, 2}), numbers({2})};
     }},
    {"lengths_absent", "rows.lengths",
     [](AttentionArgs& args) {
       args.rows = BlockTable{numbers({1, 2}), {}};
     }},
    {"scale_not_given", "scale must be positive and finite: got 0", [](AttentionArgs& args) { args.scale = 0; }},
    {"scale_negative", "attention: scale", [](AttentionArgs& args) { args.scale = -1; }},
    {"scale_nan", "attention: scale", [](AttentionArgs& args) { args.scale = kNan; }},
    {"scale_infinite", "attention: scale", [](AttentionArgs& args) { args.scale = kInf; }},
    {"sink_shape", "attention: sink", [](AttentionArgs& args) { args.sink = tensor(&args.scale, {1}); }},
    {"sink_dtype", "attention: sink", [](AttentionArgs& args) { args.sink = numbers({8}); }},
    {"out_absent", "attention: out", [](AttentionArgs& args) { args.out = {}; }},
    {"out_width", "[2, 8, 512]", [](AttentionArgs& args) { shrink<2>(args.out); }},
    {"out_heads", "[2, 8, 512]", [](AttentionArgs& args) { shrink<1>(args.out); }},
    {"out_tokens", "[2, 8, 512]", [](AttentionArgs& args) { shrink<0>(args.out); }},
    {"out_dtype", "attention: out", [](AttentionArgs& args) { args.out.dtype = DType::i32; }},
    {"lse_shape", "attention: lse", [](AttentionArgs& args) { shrink<1>(args.lse); }},
    {"lse_dtype", "attention: lse", [](AttentionArgs& args) { args.lse.dtype = DType::bf16; }},
    {"absurd_width", "lanes must be 0 to 2^40",
     [](AttentionArgs& args) {
       slots(args).indices.shape[1] = std::int64_t{1} << 50;
       slots(args).indices.stride[1] = 0;
     }},
};

Problem small() {
  Problem p{.tokens = 2, .heads = 8};
  p.list({{1, 2, 3}, {4, 5, 6}});
  return p;
}

// The call, spoilt, throws Error and leaves the outputs as they were: NaN. Then it runs as it is.
template <class Error>
void expect_refused(const Backend& backend, const Problem& p, const Problem::Tweak& spoil, const char* says,
                    Workspace workspace) {
  p.run(backend, [&](AttentionArgs& args) {
    AttentionArgs spoilt = args;
    spoil(spoilt);
    try {
      attention(backend, spoilt, workspace);
      ADD_FAILURE() << "not refused";
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(says), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find(": got "), std::string::npos) << error.what();
    }
    for (const TensorView* view : {&args.out, &args.lse})
      for (std::int64_t i = 0; i < view->elements(); ++i) ASSERT_TRUE(std::isnan(static_cast<float*>(view->data)[i]));
  });
}

template <class Error>
void expect_refused(const Backend& backend, const Problem& p, const Problem::Tweak& spoil, const char* says) {
  expect_refused<Error>(backend, p, spoil, says, PoisonedWorkspace(1 << 20));
}

TEST(Arguments, EveryRuleIsChecked) {
  for (const Backend& backend : host_backends())
    for (const BadCall& bad : kBad) {
      SCOPED_TRACE(bad.name);
      expect_refused<InvalidArgument>(backend, small(), bad.spoil, bad.says);
    }
}

TEST(Arguments, F16IsUnsupportedAndTheMessageNamesTheWayOut) {
  for (const Backend& backend : host_backends()) {
    expect_refused<Unsupported>(
        backend, small(), [](AttentionArgs& args) { args.q.dtype = DType::f16; }, "--dtype bfloat16");
    expect_refused<Unsupported>(
        backend, small(), [](AttentionArgs& args) { args.kv.pages.dtype = DType::f16; }, "--dtype bfloat16");
  }
}

TEST(Arguments, Workspace) {
  for (const Backend& backend : host_backends()) {
    const std::int64_t bytes = attention_workspace_bytes(backend, {2, 8, 3});
    ASSERT_GT(bytes, 0);
    const PoisonedWorkspace memory(bytes + kWorkspaceAlign);
    void* data = static_cast<Workspace>(memory).data;
    const auto none = [](AttentionArgs&) {};
    expect_refused<InvalidArgument>(backend, small(), none, "the workspace must hold", {});
    expect_refused<InvalidArgument>(backend, small(), none, "the workspace must hold", {data, bytes - 1});
    expect_refused<InvalidArgument>(backend, small(), none, "aligned to 256",
                                    {static_cast<std::byte*>(data) + 64, bytes});
    expect_refused<InvalidArgument>(backend, small(), none, "aligned to 256", {nullptr, bytes});
  }
}

TEST(Arguments, Bounds) {
  for (const Backend& backend : host_backends())
    for (const AttentionBounds& bad : {AttentionBounds{-1, 8, 3},
                                       {std::int64_t{1} << 41, 8, 3},
                                       {2, 0, 3},
                                       {2, kTooMany, 3},
                                       {2, 8, -1},
                                       {2, 8, std::int64_t{1} << 41},
                                       {2, 8, 3, 0, 64},
                                       {2, 8, 3, 512, -1},
                                       {2, 8, 3, 1 << 20, 0}})
      EXPECT_THROW(attention_workspace_bytes(backend, bad), InvalidArgument);
}

// Debug mode: a lane that names nothing real, other than -1, is an error before anything is written; lanes past the
// length, and pages past a request's length, are no lanes.
TEST(Arguments, CheckIndices) {
  const auto checked = [](AttentionArgs& args) { args.check_indices = true; };
  const auto refused = [&](const Backend& backend, const Problem& p, const char* says) {
    expect_refused<InvalidArgument>(backend, p, checked, says);  // and skipped without the flag
  };
  for (const Backend& backend : host_backends()) {
    Problem p = small();
    EXPECT_TRUE(same_bits(p.run(backend, checked), p.run(backend)));
    p.list({{1, -1, 127}, {4, 128, -1}});
    refused(backend, p, "in [0, 128): got 128 at [1, 1] (attention: rows)");
    p.list({{1, -2, 127}, {4, 5, -1}});
    refused(backend, p, "got -2 at [0, 1]");
    p.topk_length = {1, 3};
    p.run(backend, checked);
    p.topk_length = {2, 3};
    refused(backend, p, "got -2 at [0, 1]");
    p.wide = true;
    p.topk_length = {};
    p.list({{1, 2, std::int64_t{1} << 40}, {4, 5, -1}});
    refused(backend, p, "got 1099511627776");

    Problem dense{.tokens = 2, .heads = 2, .pages = 3, .page_size = 16};
    dense.table_width = 2;
    dense.table = {0, 3, 2, -1};
    dense.lengths = {16, 32};
    dense.run(backend, checked);
    dense.lengths = {17, 32};
    refused(backend, dense, "in [0, 3): got 3 at [0, 1]");
  }
}

}  // namespace
}  // namespace sievemla::test
