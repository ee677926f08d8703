// SPDX-License-Identifier: Apache-2.0
// Copyright The SieveMLA authors
// src/model/mlp.cc -- experts run one after another, each over the tokens that chose it, so that sums have one order.
#include "model/mlp.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/fault.h"
#include "base/view.h"
#include "model/ops.h"

namespace sievemla::model {
namespace {

using base::Fault;

// The n largest of `score` among [0, score.size()), ties to the lowest; in no special order.
std::vector<std::int64_t> largest(const std::vector<double>& score, std::int64_t n) {
  std::vector<std::int64_t> order(score.size());
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + n, order.end(), [&](std::int64_t a, std::int64_t b) {
    const double x = score[static_cast<std::size_t>(a)], y = score[static_cast<std::size_t>(b)];
    return x > y || (x == y && a < b);
  });
  order.resize(static_cast<std::size_t>(n));
  return order;
}

std::vector<float> run_mlp(const Backend& backend, const MlpWeights& mlp, const TensorView& x) {
  const std::int64_t tokens = x.dim(0), inner = mlp.gate.dim(0), hidden = mlp.down.dim(0);
  std::vector<float> gate(static_cast<std::size_t>(tokens * inner)), up(gate.size());
  std::vector<float> out(static_cast<std::size_t>(tokens * hidden));
  linear(backend, mlp.gate, x, tensor(gate.data(), {tokens, inner}));
  linear(backend, mlp.up, x, tensor(up.data(), {tokens, inner}));
  for (std::size_t i = 0; i < gate.size(); ++i) {
    const double g = gate[i];
    up[i] = static_cast<float>(g / (1 + std::exp(-g)) * up[i]);
  }
  linear(backend, mlp.down, tensor(up.data(), {tokens, inner}), tensor(out.data(), {tokens, hidden}));
  return out;
}

}  // namespace

std::vector<Choice> route(const Config& c, const std::vector<float>& bias, const float* logits) {
  std::vector<double> score, choice;
  for (std::size_t e = 0; e < bias.size(); ++e) {
    score.push_back(1 / (1 + std::exp(-static_cast<double>(logits[e]))));
    choice.push_back(score[e] + bias[e]);
  }
  if (c.expert_groups > 1 && !base::fault(Fault::no_expert_groups)) {
    const std::size_t per_group = static_cast<std::size_t>(c.experts / c.expert_groups);
    std::vector<double> group(static_cast<std::size_t>(c.expert_groups));
    for (std::size_t g = 0; g < group.size(); ++g) {
      const auto begin = choice.begin() + static_cast<std::ptrdiff_t>(g * per_group);
      std::vector<double> members(begin, begin + static_cast<std::ptrdiff_t>(per_group));
      std::partial_sort(members.begin(), members.begin() + 2, members.end(), std::greater<>());
      group[g] = members[0] + members[1];
    }
    std::vector<bool> kept(group.size());
    for (const std::int64_t g : largest(group, c.topk_groups)) kept[static_cast<std::size_t>(g)] = true;
    for (std::size_t e = 0; e < choice.size(); ++e)
      if (!kept[e / per_group]) choice[e] = -std::numeric_limits<double>::infinity();
  }
  std::vector<std::int64_t> chosen = largest(choice, c.experts_per_token);
  std::sort(chosen.begin(), chosen.end());
  double sum = 0;
  for (const std::int64_t e : chosen) sum += score[static_cast<std::size_t>(e)];
  std::vector<Choice> out;
  for (const std::int64_t e : chosen)
    out.push_back(
        {e, score[static_cast<std::size_t>(e)] / (c.norm_topk_prob ? sum + 1e-20 : 1) * c.routed_scaling_factor});
  return out;
}

void add_mlp(const Backend& backend, const Config& c, const LayerWeights& layer, const TensorView& x,
             const TensorView& y) {
  const std::int64_t tokens = x.dim(0);
  const auto add_row = [&](std::int64_t t, const float* row, double weight) {
    float* out = base::at<float>(y, t);
    for (std::int64_t i = 0; i < c.hidden; ++i) out[i] += static_cast<float>(weight * row[i]);
  };
  if (layer.mlp) {
    const std::vector<float> out = run_mlp(backend, *layer.mlp, x);
    for (std::int64_t t = 0; t < tokens; ++t) add_row(t, out.data() + t * c.hidden, 1);
  }
  if (!layer.experts) return;

  const ExpertsWeights& experts = *layer.experts;
  std::vector<float> logits(static_cast<std::size_t>(tokens * c.experts));
  linear(backend, experts.router, x, tensor(logits.data(), {tokens, c.experts}));
  struct Visit {
    std::int64_t token;
    double weight;
  };
  std::vector<std::vector<Visit>> visits(experts.experts.size());
  for (std::int64_t t = 0; t < tokens; ++t)
    for (const Choice& choice : route(c, experts.router_bias, logits.data() + t * c.experts))
      visits[static_cast<std::size_t>(choice.expert)].push_back({t, choice.weight});
  for (std::size_t e = 0; e < visits.size(); ++e) {
    if (visits[e].empty()) continue;
    std::vector<float> rows;
    for (const Visit& v : visits[e])
      rows.insert(rows.end(), base::at<float>(x, v.token), base::at<float>(x, v.token) + c.hidden);
    const std::int64_t n = static_cast<std::int64_t>(visits[e].size());
    const std::vector<float> out = run_mlp(backend, experts.experts[e], tensor(rows.data(), {n, c.hidden}));
    for (std::int64_t i = 0; i < n; ++i)
      add_row(visits[e][static_cast<std::size_t>(i)].token, out.data() + i * c.hidden,
              visits[e][static_cast<std::size_t>(i)].weight);
  }
}

}  // namespace sievemla::model
