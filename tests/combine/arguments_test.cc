// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/combine/arguments_test.cc -- every rule about arguments has a call that breaks it; a bad call writes nothing.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "sievemla/combine.h"
#include "sievemla/error.h"
#include "support/backends.h"
#include "support/random.h"

namespace sievemla::test {
namespace {

struct BadCall {
  const char* name;
  const char* says;
  void (*spoil)(CombineArgs&);
};

const BadCall kBad[] = {
    {"parts_absent", "combine: partial_out", [](CombineArgs& args) { args.partial_out = {}; }},
    {"parts_rank", "combine: partial_out", [](CombineArgs& args) { args.partial_out.rank = 3; }},
    {"parts_dtype", "f32 or bf16", [](CombineArgs& args) { args.partial_out.dtype = DType::i32; }},
    {"parts_null", "must have data", [](CombineArgs& args) { args.partial_out.data = nullptr; }},
    {"parts_not_contiguous", "last dimension must be contiguous",
     [](CombineArgs& args) { args.partial_out.stride[3] = 2; }},
    {"parts_negative_stride", "stride must not be negative",
     [](CombineArgs& args) { args.partial_out.stride[0] = -4; }},
    {"parts_device", "device cpu",
     [](CombineArgs& args) {
       args.partial_out.device = {DeviceType::cuda, 0};
     }},
    {"lse_absent", "combine: partial_lse", [](CombineArgs& args) { args.partial_lse = {}; }},
    {"lse_parts", "[2, 1, 3]", [](CombineArgs& args) { args.partial_lse.shape[0] = 1; }},
    {"lse_dtype", "combine: partial_lse", [](CombineArgs& args) { args.partial_lse.dtype = DType::bf16; }},
    {"sink_shape", "combine: sink", [](CombineArgs& args) { args.sink = args.partial_lse; }},
    {"out_absent", "combine: out", [](CombineArgs& args) { args.out = {}; }},
    {"out_width", "[1, 3, 4]", [](CombineArgs& args) { args.out.shape[2] = 3; }},
    {"out_dtype", "combine: out", [](CombineArgs& args) { args.out.dtype = DType::i64; }},
    {"merged_lse_shape", "combine: lse", [](CombineArgs& args) { args.lse.shape[1] = 2; }},
    {"merged_lse_dtype", "combine: lse", [](CombineArgs& args) { args.lse.dtype = DType::bf16; }},
};

struct Call {
  std::vector<float> parts = Random(1).f32s(2 * 3 * 4), part_lse = Random(2).f32s(2 * 3);
  std::vector<float> out = std::vector<float>(3 * 4, kNan), lse = std::vector<float>(3, kNan);
  CombineArgs args{tensor(parts.data(), {2, 1, 3, 4}),
                   tensor(part_lse.data(), {2, 1, 3}),
                   {},
                   tensor(out.data(), {1, 3, 4}),
                   tensor(lse.data(), {1, 3})};
};

template <class Error>
void expect_refused(const Backend& backend, void (*spoil)(CombineArgs&), const char* says) {
  Call call;
  CombineArgs spoilt = call.args;
  spoil(spoilt);
  try {
    combine(backend, spoilt);
    ADD_FAILURE() << "not refused";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(says), std::string::npos) << error.what();
  }
  for (const auto* values : {&call.out, &call.lse})
    for (float x : *values) EXPECT_TRUE(std::isnan(x));
  combine(backend, call.args);
  for (const auto* values : {&call.out, &call.lse})
    for (float x : *values) EXPECT_FALSE(std::isnan(x));
}

TEST(CombineArguments, EveryRuleIsChecked) {
  for (const Backend& backend : host_backends())
    for (const BadCall& bad : kBad) {
      SCOPED_TRACE(bad.name);
      expect_refused<InvalidArgument>(backend, bad.spoil, bad.says);
    }
}

TEST(CombineArguments, F16IsUnsupported) {
  for (const Backend& backend : host_backends())
    expect_refused<Unsupported>(
        backend, [](CombineArgs& args) { args.partial_out.dtype = DType::f16; }, "--dtype bfloat16");
}

}  // namespace
}  // namespace sievemla::test
