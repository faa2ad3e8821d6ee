// Attention of some queries over a part of one table: the loop over the context that every kind of work goes through.
#pragma once

#include <algorithm>
#include <cstring>

#include "attention_plan.h"
#include "kv_layout.h"
#include "scratch.h"
#include "softmax.h"
#include "tile_products.h"

namespace paged {

constexpr int kInnerRows = 64;  // query rows whose scores are held at once

// Where a group of tokens of one KV head lies.
struct Place {
  const uint32_t *key, *value;
};

// A unit for KV heads [first_head, last_head).
struct Item {
  const Unit* unit = nullptr;
  int64_t first_head = 0, last_head = 0;

  int64_t first_position() const { return unit->begin / kGroup * kGroup; }
};

// The groups of tokens of one step of an item, in words from where a head's part of a block begins.
struct Groups {
  int count = 0;
  int64_t first_head = 0;
  int64_t keys[kGroupsPerStep], values[kGroupsPerStep];

  // Those from position `begin` on.
  void find(const KvLayout& cache, const Item& item, int64_t begin) {
    const int64_t value_group = kGroup / cache.pack * cache.value_row;  // words from one group of a block to the next
    count = static_cast<int>(std::min<int64_t>(kGroupsPerStep, (item.unit->end - begin + kGroup - 1) / kGroup));
    first_head = item.first_head;
    int64_t index = begin / cache.block_size, offset = begin % cache.block_size;
    for (int i = 0; i < count; ++i) {
      const int64_t block = item.unit->block(index);
      keys[i] = block * cache.key_block + offset;
      values[i] = block * cache.value_block + offset / kGroup * value_group;
      offset += kGroup;
      if (offset == cache.block_size) offset = 0, ++index;
    }
  }
};

// What one head reads of a step.
struct HeadGroups {
  const Groups* groups;
  int64_t head;

  int count() const { return groups->count; }
  Place place(const KvLayout& cache, int group) const {
    return {cache.keys + head * cache.key_head + groups->keys[group],
            cache.values + head * cache.value_head + groups->values[group]};
  }
  // All lines of groups [first, count) at once, in turn.
  void fetch_all(const KvLayout& cache, int first) const {
    for (int64_t i = 0; i < cache.key_rows; ++i)
      for (int group = first; group < count(); ++group) fetch(place(cache, group).key + i * cache.block_size);
    for (int64_t i = 0; i < kGroup / cache.pack * cache.value_row; i += kGroup)
      for (int group = first; group < count(); ++group) fetch(place(cache, group).value + i);
  }
};

// A thread's memory for one item.
template <class Kind>
struct Room {
  Scratch heads, queries, out, scores, weights, decays, edge, running, ranges;
};

// The queries of one head of an item, and what they have attended to so far.
template <class Kind>
struct Attending {
  using Number = typename Kind::Number;

  int num_rows;               // query rows: tokens times heads of the group
  int64_t query_stride;       // numbers from one row of queries to the next
  Number* queries;            // [num_rows][query_stride], zero behind the head's size
  const int32_t *low, *high;  // [num_rows] positions seen
  float* out;                 // [num_rows][value_row]
  Running* running;           // [num_rows]
};

// One step of the context for one head: where each of its vectors lies, and those that are fetched meanwhile.
struct Step {
  int64_t begin;
  int num_vectors;
  const uint32_t *keys[kStep / kLanes], *keys_ahead[kStep / kLanes];
  ValueRows values;
  Fetch how;
};

// `words` of a pair of tokens' values with one of them taken out: what an unused slot holds must not meet a weight of
// zero, since zero times NaN is NaN.
inline void keep_one(const uint32_t* words, int64_t count, bool second, uint32_t* to) {
  const uint32_t mask = second ? 0xffff0000u : 0xffffu;
  for (int64_t i = 0; i < count; ++i) to[i] = words[i] & mask;
}

// What is fetched with row `row` of the values at `now`, which lie in one piece.
inline const uint32_t* ahead_of_row(Fetch how, const Place& now, const Place& then, int64_t row, int64_t num_rows,
                                    int64_t stride) {
  if (how != Fetch::near) return then.value + row * stride;
  const int64_t place = row * stride + kNear * kGroup, left = place - num_rows * stride;
  return left < 0 ? now.value + place : then.key + left;
}

// All rows of values of a step whose groups are all seen. They come from all groups in turn, as keys do: each group is a
// page or two of its own, and looking up several overlaps, as reading them does.
template <int kPack>
void take_all_values(int64_t stride, const Place* places, const Place* later, Fetch how, ValueRows& rows) {
  constexpr int kRows = kGroup / kPack;
  rows.count = kRows * kGroupsPerStep;
  rows.whole = true;
  for (int row = 0; row < kRows; ++row) {
    for (int group = 0; group < kGroupsPerStep; ++group) {
      const int i = row * kGroupsPerStep + group;
      rows.weight[i] = group * kRows + row;
      rows.values[i] = places[group].value + row * stride;
      rows.ahead[i] = ahead_of_row(how, places[group], later[group], row, kRows, stride);
    }
  }
}

// Likewise those that hold tokens [from, to) of a step of `num_groups` groups. A row of which one token is not seen is a
// copy in `edge`, which has room for two.
template <int kPack>
void take_values(int64_t stride, const Place* places, const Place* later, int num_groups, int64_t from, int64_t to,
                 uint32_t* edge, Fetch how, ValueRows& rows) {
  constexpr int kRows = kGroup / kPack;
  rows.count = 0;
  rows.whole = false;
  for (int row = 0; row < kRows; ++row) {
    for (int group = 0; group < num_groups; ++group) {
      const int64_t token = group * kGroup + row * kPack;
      if (token + kPack <= from || token >= to) continue;
      const uint32_t* values = places[group].value + row * stride;
      // No byte is NaN: of four tokens those that nobody sees may have weights of zero.
      if (kPack == 2 && (token < from || token + 1 >= to)) {
        keep_one(values, stride, token < from, edge);
        values = edge;
        edge += stride;
      }
      const int i = rows.count++;
      rows.weight[i] = group * kRows + row;
      rows.values[i] = values;
      rows.ahead[i] = ahead_of_row(how, places[group], later[group], row, kRows, stride);
    }
  }
}

// What `now` reads of the step at `step_begin`, of a unit that sees positions [begin, end). What `then` reads will be fetched
// line by line with it, of near lines the first kNear; at once, where `now` has no groups for that. `edge` has room for two
// rows of values.
template <int kPack>
void find_step(const KvLayout& cache, const HeadGroups& now, const HeadGroups& then, int64_t step_begin, int64_t begin,
               int64_t end, uint32_t* edge, Fetch how, Step& step) {
  constexpr int kVectors = kGroup / kLanes;  // of a group
  step.begin = step_begin;
  step.num_vectors = now.count() * kVectors;
  step.how = how;
  Place places[kGroupsPerStep], later[kGroupsPerStep];
  for (int group = 0; group < now.count(); ++group) {
    places[group] = now.place(cache, group);
    later[group] = group < then.count() ? then.place(cache, group) : places[group];
    for (int i = 0; i < kVectors; ++i) {
      step.keys[group * kVectors + i] = places[group].key + i * kLanes;
      step.keys_ahead[group * kVectors + i] = how == Fetch::near ? places[group].value : later[group].key + i * kLanes;
    }
  }
  if (now.count() < then.count()) then.fetch_all(cache, now.count());
  if (begin <= step_begin && end >= step_begin + kStep)
    return take_all_values<kPack>(cache.value_row, places, later, how, step.values);
  take_values<kPack>(cache.value_row, places, later, now.count(), begin - step_begin, end - step_begin, edge, how,
                     step.values);
}

// A CPU that gets ahead of eight streams by itself is disturbed by requests for other pages, unless so many rows use a line
// that there is time for all. Near ones take 0.89 to 1.0 of the time of far ones on AMD's Zen 5; Intel's CPUs, which
// have fewer places for lines on their way to the first cache, have been measured with far ones alone.
template <class Kind>
Fetch how_to_fetch(const KvLayout& cache, int num_rows) {
#if defined(__x86_64__)
  static const bool amd = __builtin_cpu_is("amd");
#else
  constexpr bool amd = false;
#endif
  const int64_t value_lines = kGroup / cache.pack * cache.value_row / kGroup;
  const bool once = num_rows <= kBlockRows && kRowsAtOnce == kStep && Kind::kPack != 4;
  return amd && once && std::min(cache.depth, value_lines) >= kNear ? Fetch::near : Fetch::far;
}

// Lets one head's queries attend to a step.
template <class Kind>
void attend(const KvLayout& cache, const ScoreFactors& factors, const Attending<Kind>& attending, const Step& step,
            Products<Kind>& products, Room<Kind>& room) {
  using Number = typename Kind::Number;
  constexpr int64_t kWeights = row_size<Kind>(kStep);
  float* scores = room.scores.template get<float>(kInnerRows * kStep);
  Number* weights = room.weights.template get<Number>(kInnerRows * kWeights);
  const int64_t step_end = step.begin + step.num_vectors * kLanes;
  Fetch how = step.how;  // until some rows have
  for (int first = 0; first < attending.num_rows; first += kInnerRows) {
    const int num_rows = std::min(kInnerRows, attending.num_rows - first);
    const int32_t *low = attending.low + first, *high = attending.high + first;
    if (*std::min_element(low, low + num_rows) >= step_end || *std::max_element(high, high + num_rows) <= step.begin)
      continue;
    products.score(attending.queries + first * attending.query_stride, attending.query_stride, num_rows, step.keys,
                   step.keys_ahead, how, cache.block_size, cache.depth, step.num_vectors, scores);
    const TokenScales scales{step.keys, cache.block_size, cache.depth};
    float largest[kInnerRows];
    for (int i = 0; i < num_rows; ++i)
      largest[i] = to_exponents<Kind>(scores + i * kStep, step.num_vectors, low[i] - step.begin, high[i] - step.begin,
                                      factors, scales);
    const Origins<kInnerRows> origins(largest, num_rows, attending.running + first);
    for (int i = 0; i < num_rows; ++i) {
      if (how != Fetch::none) step.values.fetch_first(i, num_rows, cache.value_row);
      to_weights<Kind>(scores + i * kStep, step.num_vectors, origins.origin[i], origins.decay[i], scales,
                       attending.running[first + i], weights + i * kWeights);
    }
    products.weigh(weights, num_rows, step.num_vectors, step.values, how, origins.decay,
                   attending.out + first * cache.value_row, cache.value_row);
    how = Fetch::none;
  }
}

}  // namespace paged
