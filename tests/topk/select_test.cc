// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// tests/topk/select_test.cc -- exact top-k: which positions, whatever the scores, lengths, widths and threads.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <bit>

#include "cpu/isa/isa.h"
#include "support/backward_pool.h"
#include "support/lazy_memory.h"
#include "support/property.h"
#include "support/safetensors.h"
#include "topk/cpu/tier.h"
#include "topk/problem.h"

namespace sievemla::test {
namespace {

Ids one_row(const Backend& backend, const Scores& scores, std::int64_t k) {
  return TopkProblem({scores}).select(backend, k);
}

// ---- ties and close values --------------------------------------------------------------------------

TEST(Case16, MassTies) {
  constexpr std::int32_t kN = 8320, kK = 2048;
  Scores scores(kN, 0.f);
  Ids want;
  for (std::int32_t i = 0; i < 100; ++i) {
    scores[static_cast<std::size_t>(83 * i)] = static_cast<float>(1 + i);
    want.push_back(83 * i);
  }
  for (std::int32_t j = 0; want.size() < kK; ++j)
    if (j % 83 != 0 || j / 83 >= 100) want.push_back(j);
  std::sort(want.begin(), want.end());
  for (const Backend& backend : host_backends(kThreads))
    EXPECT_EQ(one_row(backend, scores, kK), want) << backend.name();

  for (std::size_t j = 0; j < scores.size(); j += 3)
    if (scores[j] == 0.f) scores[j] = -0.f;  // equal to the others
  for (const Backend& backend : host_backends(kThreads))
    EXPECT_EQ(one_row(backend, scores, kK), want) << backend.name();
}

TEST(Case16, AllEqualTakesTheFirst) {
  Ids want(2048);
  std::iota(want.begin(), want.end(), 0);
  for (float value : {0.f, -0.f, 1.f, -3.5f, kInf, -kInf, kNan, 0x1p-149f})
    for (const Backend& backend : host_backends(kThreads))
      EXPECT_EQ(one_row(backend, Scores(20000, value), 2048), want) << backend.name() << ", all " << value;
}

// v = 1 + p(j) ulp, p a permutation of 0..4095.
Scores same_coarse_bin() {
  Scores scores(4096);
  for (std::uint32_t j = 0; j < 4096; ++j) scores[j] = 1.f + static_cast<float>(1667 * j % 4096) * 0x1p-23f;
  return scores;
}

TEST(Case17, SameCoarseBin) {
  Ids want;
  for (std::int32_t j = 0; j < 4096; ++j)
    if (1667 * j % 4096 >= 3584) want.push_back(j);
  ASSERT_EQ(want.size(), 512u);
  for (const Backend& backend : host_backends(kThreads)) EXPECT_EQ(one_row(backend, same_coarse_bin(), 512), want);
}

TEST(Case17, EmbeddedInALongRow) {
  constexpr std::size_t kFirst = 70001;
  Scores scores(131072, -1.f);
  const Scores close = same_coarse_bin();
  std::copy(close.begin(), close.end(), scores.begin() + kFirst);
  TopkProblem({scores}).check(512);
  Ids want = brute_force(close, 512);
  for (auto& id : want) id += kFirst;
  EXPECT_EQ(one_row(Backend::cpu({1, {}}), scores, 512), want);
}

TEST(Case17, Negated) {
  Scores scores = same_coarse_bin();
  for (float& x : scores) x = -x;
  Ids want;
  for (std::int32_t j = 0; j < 4096; ++j)
    if (1667 * j % 4096 < 512) want.push_back(j);
  for (const Backend& backend : host_backends(kThreads)) EXPECT_EQ(one_row(backend, scores, 512), want);
  scores.resize(131072, -3.f);
  for (const Backend& backend : host_backends(kThreads)) EXPECT_EQ(one_row(backend, scores, 512), want);
}

TEST(Topk, NearTiesInTheLastTenBits) {
  Random random(3);
  for (const std::uint32_t base : {0x3F800000u, 0xBF800000u, 0x00000000u, 0x80000000u, 0x7F7FFC00u}) {
    Scores scores(30000);
    for (float& x : scores) x = std::bit_cast<float>(base | static_cast<std::uint32_t>(random.below(1024)));
    for (std::int64_t k : {1, 29, 2048, 29999}) TopkProblem({scores}).check(k);
  }
}

TEST(Topk, SubnormalsAreTheirOwnValues) {
  Scores scores(5000);
  Random random(4);
  for (float& x : scores) x = static_cast<float>(random.below(4001) - 2000) * 0x1p-149f;
  TopkProblem({scores}).check(100);
}

// ---- not numbers ------------------------------------------------------------------------------------

float nan_of(std::uint64_t bits) {  // any sign, any payload
  return std::bit_cast<float>(static_cast<std::uint32_t>(0x7F800001u | (bits & 0x807FFFFFu)));
}

TEST(Case18, NanInf) {
  constexpr std::int32_t kN = 4096, kK = 2048;
  Random random(18);
  Scores scores(kN);
  for (float& x : scores) x = nan_of(random.bits());
  Ids want;
  for (std::int32_t i = 0; i < 96; ++i) {
    scores[static_cast<std::size_t>(40 * i + 3)] = static_cast<float>(i) - 48.f;
    want.push_back(40 * i + 3);
  }
  for (std::int32_t j = 0; want.size() < kK; ++j)
    if (j % 40 != 3 || j / 40 >= 96) want.push_back(j);
  std::sort(want.begin(), want.end());
  for (const Backend& backend : host_backends(kThreads)) {
    for (int call = 0; call < 20; ++call) ASSERT_EQ(one_row(backend, scores, kK), want) << backend.name();
    Scores low = scores;  // -inf ranks equal to NaN
    for (std::size_t j = 0; j < low.size(); j += 2)
      if (std::isnan(low[j])) low[j] = -kInf;
    EXPECT_EQ(one_row(backend, low, kK), want) << backend.name();
  }

  for (std::size_t j : {7u, 2049u, 4095u}) scores[j] = kInf;
  for (const Backend& backend : host_backends(kThreads)) {
    const Ids ids = one_row(backend, scores, 3);
    EXPECT_EQ(ids, (Ids{7, 2049, 4095})) << backend.name();
  }
  TopkProblem({scores}).check(kK);
}

TEST(Case18, LowestFiniteBeatsMinusInfinity) {
  Scores scores(3000, -kInf);
  scores[2500] = std::numeric_limits<float>::lowest();
  scores[2600] = nan_of(~0ull);
  for (const Backend& backend : host_backends(kThreads)) EXPECT_EQ(one_row(backend, scores, 2), (Ids{0, 2500}));
}

// ---- lengths and widths -----------------------------------------------------------------------------

TEST(Case19, BadLengths) {
  constexpr std::int64_t kK = 4, kWidth = 12;
  for (const Ids& lengths : {Ids{10, -1, 0, 3}, Ids{9, 10, -2, -1, -1, 0, 2, 3}}) {
    const std::int64_t rows = static_cast<std::int64_t>(lengths.size());
    Scores scores(static_cast<std::size_t>(rows * kWidth), kInf);
    for (std::size_t t = 0; t < lengths.size(); ++t)
      for (std::int32_t j = 0; j < lengths[t]; ++j)
        scores[t * kWidth + static_cast<std::size_t>(j)] = static_cast<float>(j);
    for (const Backend& backend : host_backends(kThreads)) {
      Guarded<std::int32_t> positions(rows * kK, kUnwritten), slots(rows * kK, kUnwritten);
      const Ids starts(lengths.size(), 0), table(lengths.size(), 5);
      TopkArgs args;
      args.scores = tensor(scores.data(), {rows, kWidth});
      args.starts = tensor(starts.data(), {rows});
      args.lengths = tensor(lengths.data(), {rows});
      args.positions = tensor(positions.data(), {rows, kK});
      args.slots = tensor(slots.data(), {rows, kK});
      args.map = {tensor(table.data(), {rows, 1}), {}, 16, {}};
      topk(backend, args, PoisonedWorkspace(topk_workspace_bytes(backend, {rows, kWidth, kK})));
      for (std::int64_t t = 0; t < rows; ++t)
        for (std::int32_t lane = 0; lane < kK; ++lane) {
          const std::int32_t length = lengths[static_cast<std::size_t>(t)];
          const std::int32_t want = length <= kK ? (lane < length ? lane : -1) : length - 4 + lane;
          EXPECT_EQ(positions[static_cast<std::size_t>(t * kK + lane)], want) << "row " << t;
          EXPECT_EQ(slots[static_cast<std::size_t>(t * kK + lane)], want < 0 ? -1 : 80 + want) << "row " << t;
        }
      EXPECT_TRUE(positions.intact() && slots.intact());
    }
  }
}

TEST(Topk, LengthsAroundK) {
  Random random(5);
  constexpr std::int64_t kK = 33;
  std::vector<Scores> rows;
  for (std::int64_t length = 0; length <= kK + 1; ++length) rows.push_back(random.f32s(length));
  TopkProblem(rows).check(kK);
}

TEST(Case07, AnyTopkWidth) {
  Random random(7);
  std::vector<Scores> rows;
  for (std::int64_t length : {3000, 1, 0, 2176, 2500}) rows.push_back(random.f32s(length));
  const TopkProblem problem(rows);
  for (std::int64_t k : {1, 2, 63, 64, 65, 127, 128, 192, 256, 512, 1000, 1024, 1152, 2044, 2048, 2051, 2176, 5000})
    problem.check(k);  // 5000: wider than the scores
}

TEST(Topk, NothingToDoIsLegal) {
  const float score = 1.f;
  const std::int32_t length = 1;
  std::int32_t position = kUnwritten;
  for (const Backend& backend : host_backends(kThreads)) {
    TopkArgs none;
    none.scores = tensor<float>(nullptr, {0, 0});
    none.lengths = tensor<std::int32_t>(nullptr, {0});
    none.positions = tensor<std::int32_t>(nullptr, {0, 7});
    topk(backend, none, {});
    TopkArgs narrow;
    narrow.scores = tensor(&score, {1, 1});
    narrow.lengths = tensor(&length, {1});
    narrow.positions = tensor(&position, {1, 0});
    topk(backend, narrow, {});
    EXPECT_EQ(position, kUnwritten);
    TopkArgs empty;  // a row of no columns
    const std::int32_t zero = 0;
    empty.scores = tensor<float>(nullptr, {1, 0});
    empty.lengths = tensor(&zero, {1});
    empty.positions = tensor(&position, {1, 1});
    topk(backend, empty, PoisonedWorkspace(topk_workspace_bytes(backend, {1, 0, 1})));
    EXPECT_EQ(std::exchange(position, kUnwritten), -1);
  }
}

TEST(Topk, AMillionScores) {
  Random random(6);
  Scores scores(1 << 20);
  for (float& x : scores) x = static_cast<float>(random.uniform());
  TopkProblem({scores}).check(2048);
  for (float& x : scores) x = x > 0.9999f ? x : 0.f;  // about 50 winners and a mass tie
  TopkProblem({scores}).check(2048);
}

TEST(Topk, ClusteredScores) {  // one coarse bin holds more than the list does
  Random random(8);
  for (float centre : {100.f, -100.f}) {
    Scores scores(60000);
    for (float& x : scores) x = centre + 0.01f * static_cast<float>(random.uniform());
    scores[17] = -kInf;
    scores[40000] = 1e30f;
    for (std::int64_t k : {1, 2, 300, 2048, 59999}) TopkProblem({scores}).check(k);
  }
}

// ---- lists and parts --------------------------------------------------------------------------------

// Of the tiers that this process may use.
std::vector<const stage::topk::Tier*> tiers() {
  std::vector<const stage::topk::Tier*> all = {&stage::topk::kPortable};
#if defined(__x86_64__)
  if (cpu::may_use<cpu::Isa::avx2>()) all.push_back(&stage::topk::kAvx2);
  if (cpu::may_use<cpu::Isa::avx512>()) all.push_back(&stage::topk::kAvx512);
#endif
  return all;
}

// A list as a caller has to give it, between guards.
struct List {
  explicit List(std::int64_t capacity)
      : id(capacity + stage::topk::kListPad, kUnwritten), key(capacity + stage::topk::kListPad, kUnwritten) {
    view = {id.data(), key.data(), capacity, 0};
  }
  Ids ids() const { return {id.begin(), id.begin() + view.count}; }
  Guarded<std::int32_t> id, key;
  stage::topk::Candidates view;
};

// Without a guess every score of an ascending row is better than all before it: the list fills up again and again.
TEST(Topk, TheListFillsUp) {
  constexpr std::int64_t kN = 100'000, kK = 300;
  Scores scores(kN);
  for (std::size_t i = 0; i < kN; ++i) scores[i] = static_cast<float>(i / 7);  // ties, some of them cut
  for (const auto* tier : tiers()) {
    List list(2 * kK + stage::topk::kListSlack);
    tier->collect(scores.data(), kN, 0, kN, kK, false, &list.view);
    EXPECT_LE(list.view.count, list.view.capacity);
    tier->keep(scores.data(), kK, &list.view);
    EXPECT_EQ(list.ids(), brute_force(scores, kK));
    EXPECT_TRUE(list.id.intact() && list.key.intact());
  }
  TopkProblem({scores}).check(kK);
}

// A row whose sample is better than the rest: the guess lies above the k-th largest.
TEST(Topk, AGuessThatIsTooHigh) {
  constexpr std::int64_t kN = 65'536, kK = 4000, kSamples = 1024, kStride = kN / kSamples;
  Scores scores = Random(13).f32s(kN);
  for (std::int64_t i = 0; i < kSamples; ++i) {  // as guess_bound takes it
    const std::int64_t shift = i % 64 * 37 % 64;
    scores[static_cast<std::size_t>(i * kStride + shift * kStride / 64)] += 10.f;
  }
  for (const auto* tier : tiers()) {
    List list(2 * kK + stage::topk::kListSlack);
    tier->collect(scores.data(), kN, 0, kN, kK, true, &list.view);
    ASSERT_LT(list.view.count, kK) << "the row does not deceive it";
  }
  TopkProblem({scores, Random(14).f32s(1000), scores}).check(kK);
  Scores twice = scores;
  twice.insert(twice.end(), scores.begin(), scores.end());
  TopkProblem({twice}).check(kK);
}

// One row on many threads: it is cut into parts. Winners in one part, in all, and ties that end in any of them.
TEST(Topk, ALongRowOnManyThreads) {
  constexpr std::size_t kN = 600'000;
  Scores spread = Random(15).f32s(kN), tail = spread, ties(kN, -1.f);
  for (std::size_t i = kN - 5000; i < kN; ++i) tail[i] += 10.f;
  for (std::size_t i = 0; i < kN; i += 100) ties[i] = 3.f;
  for (const Scores* scores : {&spread, &tail, &ties})
    for (std::int64_t k : {1, 2048, 4000, 5999}) {
      const Ids want = brute_force(*scores, k);
      for (int threads : {1, 2, 7, 16})
        EXPECT_EQ(one_row(Backend::cpu({threads, {}}), *scores, k), want) << threads << " threads, k = " << k;
    }
}

TEST(Topk, PositionsOf31Bits) {
  constexpr std::int64_t kN = INT32_MAX, kK = 100;
  const LazyMemory memory(kN * 4);
  if (!memory) GTEST_SKIP() << "no 8 GiB of address space";
  float* scores = reinterpret_cast<float*>(memory.data());
  Ids want(kK - 4), positions(kK);
  std::iota(want.begin(), want.end(), 0);
  for (std::int32_t i : {INT32_MAX - 66, INT32_MAX - 17, INT32_MAX - 2, INT32_MAX - 1})
    scores[i] = 1.f, want.push_back(i);
  const std::int32_t length = INT32_MAX;
  const Backend backend = Backend::cpu({.threads = 3});
  TopkArgs args;
  args.scores = tensor(scores, {1, kN});
  args.lengths = tensor(&length, {1});
  args.positions = tensor(positions.data(), {1, kK});
  topk(backend, args, PoisonedWorkspace(topk_workspace_bytes(backend, {1, kN, kK})));
  EXPECT_EQ(positions, want);
}

// ---- memory -----------------------------------------------------------------------------------------

// A mapping between two pages that fault on any access.
class FencedFloats {
 public:
  explicit FencedFloats(std::size_t n) : page_(static_cast<std::size_t>(sysconf(_SC_PAGESIZE))), n_(n) {
    bytes_ = (n * sizeof(float) + page_ - 1) / page_ * page_;
    base_ = static_cast<std::byte*>(mmap(nullptr, bytes_ + 2 * page_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base_ + page_, bytes_, PROT_READ | PROT_WRITE);
  }
  FencedFloats(const FencedFloats&) = delete;
  ~FencedFloats() { munmap(base_, bytes_ + 2 * page_); }
  float* first() { return reinterpret_cast<float*>(base_ + page_); }               // right after the fence
  float* last() { return reinterpret_cast<float*>(base_ + page_ + bytes_) - n_; }  // ends right before the fence

 private:
  std::size_t page_, n_, bytes_ = 0;
  std::byte* base_ = nullptr;
};

TEST(Topk, ReadsNothingOutsideTheVisibleColumns) {
  constexpr std::int32_t kN = 1025, kMargin = 100000;  // columns of the margin are not mapped
  Random random(9);
  FencedFloats memory(kN);
  for (bool at_end : {false, true}) {
    float* row = at_end ? memory.last() : memory.first();
    for (std::int32_t j = 0; j < kN; ++j) row[j] = random.uniform_f32();
    const Ids want = brute_force({row, row + kN}, 100);
    const std::int32_t start = kMargin, length = kN;
    for (const Backend& backend : host_backends(kThreads)) {
      Ids positions(100);
      TopkArgs args;
      args.scores = tensor(row - kMargin, {1, 2 * kMargin + kN});
      args.starts = tensor(&start, {1});
      args.lengths = tensor(&length, {1});
      args.positions = tensor(positions.data(), {1, 100});
      topk(backend, args, PoisonedWorkspace(topk_workspace_bytes(backend, {1, args.scores.dim(1), 100})));
      EXPECT_EQ(positions, want);
    }
  }
}

TEST(Topk, OutputsMayBeStrided) {
  Random random(10);
  const TopkProblem problem({random.f32s(50), random.f32s(3), random.f32s(60)});
  constexpr std::int64_t kK = 20;
  const Ids want = problem.expected(kK), table(60, 0);
  for (const Backend& backend : host_backends(kThreads)) {
    Ids positions(3 * 100, kUnwritten);
    std::vector<std::int64_t> slots(3 * 100, kUnwritten);
    TopkArgs args = problem.args();
    args.positions = tensor(positions.data(), {3, kK});
    args.slots = tensor(slots.data(), {3, kK});
    args.positions.stride = args.slots.stride = {100, 3};
    args.map = {tensor(table.data(), {1, 60}), {}, 1, {}};
    topk(backend, args, PoisonedWorkspace(topk_workspace_bytes(backend, {3, problem.width(), kK})));
    for (std::int64_t i = 0; i < 300; ++i) {
      const std::int64_t t = i / 100, lane = i % 100 / 3;
      const bool written = i % 100 % 3 == 0 && lane < kK;
      const std::int32_t id = written ? want[static_cast<std::size_t>(t * kK + lane)] : kUnwritten;
      EXPECT_EQ(positions[static_cast<std::size_t>(i)], id);
      EXPECT_EQ(slots[static_cast<std::size_t>(i)], !written ? kUnwritten : id < 0 ? -1 : 0);
    }
  }
}

TEST(Topk, AHostsOwnThreadPoolWillDo) {
  BackwardPool pool;
  Random random(11);
  std::vector<Scores> rows;
  for (int t = 0; t < 10; ++t) rows.push_back(random.f32s(500));
  const TopkProblem problem(rows);
  EXPECT_EQ(problem.select(pool.backend(), 64), problem.expected(64));
  EXPECT_GT(pool.bodies, 1);
}

// ---- goldens and properties -------------------------------------------------------------------------

TEST(Golden, TraceIndexerTopk) {
  const Safetensors trace("trace-indexer/trace.safetensors");
  std::vector<float> logits = trace.values<float>("logits");
  const std::int64_t rows = trace.shape("logits")[0], width = trace.shape("logits")[1], k = trace.shape("topk")[1];
  const Ids lengths = trace.values<std::int32_t>("row_lens"), table = trace.values<std::int32_t>("block_table");
  const Ids request = trace.values<std::int32_t>("row_request");
  for (std::int64_t t = 0; t < rows; ++t)
    for (std::int64_t j = lengths[static_cast<std::size_t>(t)]; j < width; ++j)
      logits[static_cast<std::size_t>(t * width + j)] = kInf;  // would win if it were read
  for (const Backend& backend : host_backends(kThreads)) {
    Ids positions(static_cast<std::size_t>(rows * k)), slots(positions.size());
    TopkArgs args;
    args.scores = tensor(logits.data(), {rows, width});
    args.lengths = tensor(lengths.data(), {rows});
    args.positions = tensor(positions.data(), {rows, k});
    args.slots = tensor(slots.data(), {rows, k});
    args.map.block_table = tensor(table.data(), {trace.shape("block_table")[0], trace.shape("block_table")[1]});
    args.map.row_request = tensor(request.data(), {rows});
    args.map.page_size = 64;
    topk(backend, args, PoisonedWorkspace(topk_workspace_bytes(backend, {rows, width, k})));
    EXPECT_EQ(positions, trace.values<std::int32_t>("topk")) << backend.name();
    EXPECT_EQ(slots, trace.values<std::int32_t>("topk_slots")) << backend.name();
  }
}

// Few distinct values, among them both zeros, infinities and NaN: ties everywhere.
rc::Gen<Scores> tied_scores() {
  return rc::gen::container<Scores>(
      rc::gen::element(0.f, -0.f, 1.f, 1.f + 0x1p-23f, -1.f, 2.5f, 0x1p-149f, kInf, -kInf, kNan, -kNan));
}

RC_GTEST_PROP(TopkProperty, EqualsBruteForceOnTies, ()) {
  const auto rows = *rc::gen::container<std::vector<Scores>>(tied_scores());
  const TopkProblem problem(rows, *rc::gen::arbitrary<std::uint64_t>());
  const auto k = *rc::gen::inRange<std::int64_t>(0, 120);
  const Ids want = problem.expected(k);
  for (const Backend& backend : host_backends(kThreads)) RC_ASSERT(problem.select(backend, k) == want);
}

RC_GTEST_PROP(TopkProperty, EqualsBruteForceOnAnyBits, ()) {
  const auto bits =
      *rc::gen::container<std::vector<std::uint32_t>>(*rc::gen::inRange(0, 3000), rc::gen::arbitrary<std::uint32_t>());
  Scores scores;
  for (std::uint32_t b : bits) scores.push_back(std::bit_cast<float>(b));
  const auto k = *rc::gen::inRange<std::int64_t>(0, static_cast<std::int64_t>(scores.size()) + 2);
  const TopkProblem problem({scores});
  const Ids want = problem.expected(k);
  for (const Backend& backend : host_backends(kThreads)) RC_ASSERT(problem.select(backend, k) == want);
}

// A wider selection keeps what a narrower one found, and adds nothing that is better.
RC_GTEST_PROP(TopkProperty, WiderContainsNarrower, ()) {
  const auto scores = *tied_scores();
  const auto k = *rc::gen::inRange<std::int64_t>(0, 100);
  for (const Backend& backend : host_backends(kThreads)) {
    const Ids narrow = one_row(backend, scores, k), wide = one_row(backend, scores, k + 1);
    Ids kept;
    std::copy_if(narrow.begin(), narrow.end(), std::back_inserter(kept), [](std::int32_t id) { return id >= 0; });
    RC_ASSERT(std::includes(wide.begin(), wide.begin() + std::min<std::int64_t>(k + 1, std::ssize(scores)),
                            kept.begin(), kept.end()));
  }
}

}  // namespace
}  // namespace sievemla::test
