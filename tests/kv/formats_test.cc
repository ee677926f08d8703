// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/kv/formats_test.cc -- descriptors and names of row types and index formats.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "sievemla/error.h"
#include "sievemla/kv_format.h"

namespace sievemla {
namespace {

template <class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const InvalidArgument& e) {
    return e.what();
  }
  return "nothing was thrown";
}

TEST(KvFormats, EachIsFoundByNameAndByValue) {
  std::set<std::string_view> names;
  for (const KvFormatInfo& format : kv_formats()) {
    EXPECT_TRUE(names.insert(format.name).second) << format.name;
    EXPECT_EQ(kv_format_by_name(format.name), format.format);
    EXPECT_EQ(&info(format.format), &format);
    EXPECT_FALSE(format.source.empty()) << format.name;
  }
  EXPECT_EQ(names, (std::set<std::string_view>{"f32", "bf16", "fp8_ds_mla", "fp8_nope"}));
}

TEST(KvFormats, RowBytes) {
  EXPECT_EQ(info(KvFormat::f32).row_bytes(512, 64), 2304);
  EXPECT_EQ(info(KvFormat::bf16).row_bytes(512, 64), 1152);
  EXPECT_EQ(info(KvFormat::bf16).row_bytes(512, 0), 1024);
  EXPECT_EQ(info(KvFormat::fp8_ds_mla).row_bytes(512, 64), 656);
  EXPECT_EQ(info(KvFormat::fp8_nope).row_bytes(512, 0), 528);
}

TEST(KvFormats, DescriptorsSayWhatARowNeeds) {
  const KvFormatInfo& packed = info(KvFormat::fp8_ds_mla);
  EXPECT_EQ(packed.storage, DType::u8);
  EXPECT_EQ(packed.latent, 512);
  EXPECT_EQ(packed.rope, 64);
  EXPECT_EQ(packed.scale_group, 128);
  EXPECT_EQ(info(KvFormat::fp8_nope).rope, 0);
  EXPECT_EQ(info(KvFormat::bf16).storage, DType::bf16);
  EXPECT_EQ(info(KvFormat::f32).storage, DType::f32);
  EXPECT_EQ(info(KvFormat::f32).latent, 0);
  EXPECT_EQ(info(KvFormat::f32).rope, -1);
}

TEST(KvFormats, AnUnknownNameListsThoseThereAre) {
  EXPECT_EQ(message_of([] { kv_format_by_name("fp8"); }),
            "kv format is one of f32, bf16, fp8_ds_mla, fp8_nope: got 'fp8' (kv format)");
  EXPECT_EQ(message_of([] { index_format_by_name("e4m3"); }),
            "index format is one of f32, bf16, fp8: got 'e4m3' (index format)");
  EXPECT_THROW(info(static_cast<KvFormat>(250)), InvalidArgument);
}

TEST(IndexFormats, NamesGoBothWays) {
  for (IndexFormat format : {IndexFormat::f32, IndexFormat::bf16, IndexFormat::fp8})
    EXPECT_EQ(index_format_by_name(name_of(format)), format);
  EXPECT_EQ(name_of(IndexFormat::fp8), "fp8");
}

}  // namespace
}  // namespace sievemla
