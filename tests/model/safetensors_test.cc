// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/model/safetensors_test.cc -- a file is read as written, and nothing in it is trusted.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/view.h"
#include "model/files.h"
#include "model/json.h"

namespace sievemla::test {
namespace {

using model::SafeTensors;

std::string refused_bytes(const std::string& bytes, std::initializer_list<std::string_view> parts) {
  return refused([&] { SafeTensors file(bytes, "f"); }, parts);
}

const std::string kTwo = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
                         R"("b":{"dtype":"U8","shape":[2,2],"data_offsets":[8,12]}})";
const std::string kTwelve(12, '\1');

TEST(SafeTensors, ReadsWhatIsThere) {
  const std::string bytes = safetensors(R"({"__metadata__":{"k":"v"},)" + kTwo.substr(1) + "   ", kTwelve);
  const SafeTensors file(bytes, "f");
  EXPECT_EQ(file.names(), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(file.metadata().at("k"), "v");
  const TensorView b = file.tensor("b", DType::u8, {2, 2});
  EXPECT_EQ(*base::at<std::uint8_t>(b, 1, 1), 1);
  EXPECT_EQ(b.step(0), 2);
  EXPECT_EQ(file.find("c"), nullptr);
  refused([&] { file.tensor("c"); }, {"f: tensor c"});
  refused([&] { file.tensor("b", DType::i32, {2, 2}); }, {"dtype must be i32: got u8 (f: tensor b)"});
  refused([&] { file.tensor("b", DType::u8, {4}); }, {"[4]", "got [2, 2] (f: tensor b)"});
}

TEST(SafeTensors, EmptyAndScalarTensors) {
  const std::string bytes = safetensors(
      R"({"e":{"dtype":"F32","shape":[0,7],"data_offsets":[0,0]},"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]}})",
      std::string(4, '\0'));
  const SafeTensors file(bytes, "f");
  EXPECT_EQ(file.tensor("e").view.elements(), 0);
  EXPECT_EQ(file.tensor("s").view.elements(), 1);
  EXPECT_TRUE(SafeTensors(safetensors("{}"), "f").names().empty());
}

TEST(SafeTensors, MisalignedDataIsReadable) {  // nothing in the format aligns the header or a tensor
  for (std::size_t spaces = 0; spaces < 8; ++spaces) {
    std::string data(9, '\0');
    const float one = 1.f, two = 2.f;
    std::memcpy(data.data() + 1, &one, 4);
    std::memcpy(data.data() + 5, &two, 4);
    const std::string bytes = safetensors(R"({"o":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                                          R"("x":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}})" +
                                              std::string(spaces, ' '),
                                          data);
    const SafeTensors file(bytes, "f");
    const TensorView x = file.tensor("x", DType::f32, {2});
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(x.data) % 4, 0u);
    EXPECT_EQ(*base::at<float>(x, 0), 1.f);
    EXPECT_EQ(*base::at<float>(x, 1), 2.f);
  }
}

TEST(SafeTensors, GoldenFilesHoldTheirTensors) {
  const SafeTensors file(golden_dir("glm5-tiny") / "golden.safetensors");
  EXPECT_EQ(file.tensor("prompt_ids", DType::i32, {120}).elements(), 120);
  EXPECT_EQ(SafeTensors(golden_dir("trace-glm5") / "trace.safetensors").metadata().at("kind"), "sparse_mla_trace");
}

TEST(BadFile, TruncatedAnywhere) {
  const std::string whole = safetensors(kTwo, kTwelve);
  for (std::size_t n = 0; n < whole.size(); ++n) refused_bytes(whole.substr(0, n), {": got ", "f"});
  refused_bytes("", {"8 bytes of header length: got 0 bytes (f)"});
  refused_bytes(whole + "x", {"must fill the file: got 12 of 13 bytes (f)"});
}

TEST(BadFile, HeaderLength) {
  refused_bytes(safetensors(kTwo, kTwelve, 1000), {"within the file: got 1000"});
  refused_bytes(safetensors(kTwo, kTwelve, 100'000'001), {"at most 100000000 bytes: got 100000001 (f)"});
  refused_bytes(safetensors(kTwo, kTwelve, UINT64_MAX - 1), {"100000000"});
  refused_bytes(safetensors(kTwo, kTwelve, kTwo.size() - 1), {"valid JSON", "(f)"});
  refused_bytes(safetensors(kTwo, kTwelve, 0), {"valid JSON"});
}

TEST(BadFile, HeaderThatIsNotOne) {
  for (const char* header :
       {"", "x", "[]", "1", "null", "\"a\"", "{\"a\":1}", "{\"a\":[]}", "{\"a\":null}", "{\"a\":{}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[]}}", "{\"__metadata__\":{\"a\":1}}", "{\"__metadata__\":{\"a\":{}}}",
        "{\"__metadata__\":3}", "{} x", "{\"a\":\xff}", "{\"a\":{\"dtype\":{},\"shape\":[],\"data_offsets\":[0,0]}}"})
    refused_bytes(safetensors(header), {": got ", "f"});
  std::string deep(100'000, '[');
  refused_bytes(safetensors(deep), {"got an array"});
  for (const char* rest : {"", "junk{{{", "  "})  // a NUL ends no header
    refused_bytes(safetensors(kTwo + '\0' + rest, kTwelve),
                  {"valid JSON: got a NUL at its byte " + std::to_string(kTwo.size() + 1) + " (f)"});
  for (const char* header :
       {R"({"a\u0000b":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}})", R"({"__metadata__":{"kind":"a\u0000b"}})",
        R"({"__metadata__":{"a\u0000b":"x"}})", R"({"c":{"dtype":"a\u0000","shape":[0],"data_offsets":[0,0]}})"})
    refused_bytes(safetensors(header), {"must hold no NUL: got one behind 'a' (f: "});
  deep = "{\"a\":" + std::string(100'000, '{');
  refused_bytes(safetensors(deep), {"JSON"});
}

// One tensor `a` whose description has a part replaced.
std::string with(const std::string& part, const std::string& other) {
  std::string header = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  header.replace(header.find(part), part.size(), other);
  return safetensors(header, std::string(8, '\0'));
}

TEST(BadFile, DTypes) {
  // An unknown one is no matter until the tensor is asked for; where its bytes lie is.
  for (const std::string dtype : {"F64", "F8_E8M0", ""}) {
    const std::string bytes = with("F32", dtype);
    const SafeTensors file(bytes, "f");
    EXPECT_EQ(file.find("a")->dtype, dtype);
    EXPECT_EQ(file.find("a")->view.elements(), 8);
    refused([&] { file.tensor("a"); }, {"F32, F16, BF16", "got '" + dtype + "' (f: tensor a)"});
    refused([&] { file.tensor("a", DType::u8, {8}); }, {"F32, F16, BF16"});
  }
  refused_bytes(with("\"F32\",\"shape\":[2],\"data_offsets\":[0,8]", "\"F64\",\"shape\":[1],\"data_offsets\":[0,9]"),
                {"within the data"});
  refused_bytes(with("\"F32\",\"shape\":[2],\"data_offsets\":[0,8]", "\"F64\",\"shape\":[1],\"data_offsets\":[0,7]"),
                {"fill the file"});
  refused_bytes(with("\"F32\"", "4"), {"got a number (f: tensor a)"});
  refused_bytes(with("F32", "BF16"), {"shape times dtype: got 8 bytes, not 4 (f: tensor a)"});
  EXPECT_EQ(SafeTensors(with("\"F32\",\"shape\":[2]", "\"F8_E4M3\",\"shape\":[8]"), "f").tensor("a").view.dtype,
            DType::u8);
}

TEST(BadFile, Shapes) {
  refused_bytes(with("[2]", "[3]"), {"got 8 bytes, not 12"});
  refused_bytes(with("[2]", "[-2]"), {"not be negative: got -2 (f: tensor a)"});
  refused_bytes(with("[2]", "[2.0]"), {"whole numbers: got 2.0"});
  refused_bytes(with("[2]", "[\"2\"]"), {"got a string"});
  refused_bytes(with("[2]", "[[2]]"), {"got an array"});
  refused_bytes(with("[2]", "[1,1,1,1,2]"), {"at most 4 extents"});
  refused_bytes(with("[2]", "[4294967296,4294967296]"), {"63 bits"});  // 2^64 elements: 0 after wrapping
  refused_bytes(with("[2]", "[4611686018427387904]"), {"63 bits"});    // 2^64 bytes
  refused_bytes(with("[2]", "[9223372036854775808]"), {"63 bits"});
  refused_bytes(with("[2]", "[0,4294967296,4294967296]"), {"63 bits"});     // no bytes, but such strides
  refused_bytes(with("[2]", "[18446744073709551616]"), {"whole numbers"});  // past u64: a float to the parser
}

TEST(BadFile, Offsets) {
  refused_bytes(with("[0,8]", "[0,9]"), {"within the data: got [0, 9) of 8 bytes (f: tensor a)"});
  refused_bytes(with("[0,8]", "[8,0]"), {"within the data"});
  refused_bytes(with("[0,8]", "[0,18446744073709551615]"), {"within the data"});
  refused_bytes(with("[0,8]", "[18446744073709551608,0]"), {"within the data"});
  refused_bytes(with("[0,8]", "[0]"), {"[begin, end]: got 1 numbers"});
  refused_bytes(with("[0,8]", "[0,4,8]"), {"[begin, end]"});
  refused_bytes(with("[0,8]", "[0,8,1,1,1,1,1,1]"), {"[begin, end]"});
  refused_bytes(with("[0,8]", "[0,7]"), {"got 7 bytes, not 8"});
}

TEST(BadFile, OverlapsAndHoles) {
  const auto two = [](const std::string& b, std::size_t n) {
    return safetensors(
        R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + b +
            "}}",
        std::string(n, '\0'));
  };
  SafeTensors good(two("[4,8]", 8), "f");
  refused_bytes(two("[0,4]", 8), {"must not overlap: got begin 0 before the end 4"});
  refused_bytes(two("[3,7]", 8), {"must not overlap"});
  refused_bytes(two("[5,9]", 9), {"no hole: got begin 5 after the end 4 (f: tensor b)"});
  refused_bytes(two("[4,8]", 9), {"must fill the file"});
}

TEST(BadFile, KeysTwice) {
  const std::string a = R"("a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  refused_bytes(safetensors("{" + a + "," + a + "}", "x"), {"must not occur twice: got a"});
  refused_bytes(safetensors(R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "x"), {"twice"});
  refused_bytes(safetensors(R"({"__metadata__":{"x":"1","x":"2"}})"), {"twice"});
  refused_bytes(safetensors(R"({"__metadata__":{},"__metadata__":{}})"), {"twice"});
  refused_bytes(safetensors(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1}})", "x"), {"alone: got 'x'"});
}

TEST(BadFile, NumbersInAHeaderTakeNoMemory) {
  struct rusage before{}, after{};
  ::getrusage(RUSAGE_SELF, &before);
  for (const char* shape : {"[1073741824]", "[1099511627776]", "[1048576,1048576]", "[2305843009213693951]"})
    refused_bytes(with("[2]", shape), {"f: tensor a"});
  refused_bytes(safetensors("{", "", 99'999'999), {"within the file"});
  ::getrusage(RUSAGE_SELF, &after);
  EXPECT_LT(after.ru_maxrss - before.ru_maxrss, 32 << 10);  // KiB
}

TEST(BadFile, PathsThatAreNoFile) {
  const TempDir dir;
  refused([&] { SafeTensors file(dir / "none"); }, {"readable", "No such file", "none"});
  refused([&] { SafeTensors file(dir.path()); }, {"regular file", "a directory"});
  refused([&] { SafeTensors file(fs::path("/dev/zero")); }, {"regular file", "something else"});
  write_file(dir / "empty", "");
  refused([&] { SafeTensors file(dir / "empty"); }, {"got 0 bytes", "empty"});
  ASSERT_EQ(::mkfifo((dir / "pipe").c_str(), 0600), 0);
  refused([&] { SafeTensors file(dir / "pipe"); }, {"regular file"});  // and does not wait for a writer
  if (::geteuid() != 0) {
    write_file(dir / "secret", "x");
    fs::permissions(dir / "secret", fs::perms::none);
    refused([&] { SafeTensors file(dir / "secret"); }, {"readable", "Permission denied"});
  }
}

// Memory that does not suffice is no fault of the file.
TEST(MappedFile, AddressesThatRunOut) {
  const TempDir dir;
  write_file(dir / "sparse", "");
  fs::resize_file(dir / "sparse", std::uintmax_t{1} << 30);
  std::uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  ASSERT_GT(pages, 0u);
  struct rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_AS, &before), 0);
  struct rlimit tight = before;
  tight.rlim_cur = pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)) + (std::uint64_t{256} << 20);
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &tight), 0);
  EXPECT_THROW(model::MappedFile file(dir / "sparse"), std::bad_alloc);
  ::setrlimit(RLIMIT_AS, &before);
  EXPECT_EQ(model::MappedFile(dir / "sparse").bytes().size(), std::size_t{1} << 30);
}

TEST(ReadFile, AsMuchAsIsAskedFor) {
  const TempDir dir;
  write_file(dir / "f", "abc");
  EXPECT_EQ(model::read_file(dir / "f", 2), "ab");
  EXPECT_EQ(model::read_file(dir / "f", 100), "abc");
  refused([&] { model::read_file(dir / "none", 1); }, {"readable", "No such file"});
  refused([&] { model::read_file(dir.path(), 1); }, {"a directory"});
}

TEST(BadFile, Json) {
  const auto bad = [](const std::string& text, std::initializer_list<std::string_view> parts) {
    refused([&] { model::parse_json(text, "j"); }, parts);
  };
  bad("", {"valid JSON", "(j)"});
  bad("{", {"valid JSON: got parse error"});
  bad(R"({"a":1,"a":2})", {"twice: got \"a\" (j)"});
  bad(std::string(17, '[') + std::string(17, ']'), {"16 deep"});
  bad(std::string(1'000'000, '['), {"16 deep"});
  bad("1e999", {"valid JSON"});
  bad(std::string("{}\0", 3), {"valid JSON: got a NUL at its byte 3 (j)"});
  bad(std::string("{}\0 junk", 8), {"a NUL at its byte 3"});
  bad("{\"a\":\"\xff\"}", {"valid JSON"});
  EXPECT_EQ(model::parse_json(R"({"a":{"a":1},"b":{"a":2}})", "j")["b"]["a"], 2);  // other objects, other keys
}

}  // namespace
}  // namespace sievemla::test
