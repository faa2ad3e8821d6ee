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

// A unit for one KV head.
struct Item {
  const Unit* unit = nullptr;
  int64_t head = 0;
};

// Goes from group to group along an item's context.
class Walk {
 public:
  explicit Walk(const KvLayout& cache) : cache_(cache), value_group_(kGroup / cache.pack * cache.value_row) {}

  void go_to(const Item& item, int64_t position) {
    item_ = item;
    keys_ = cache_.keys + item.head * cache_.key_head;
    values_ = cache_.values + item.head * cache_.value_head;
    position_ = position;
    index_ = position / cache_.block_size, offset_ = position % cache_.block_size;
    value_offset_ = offset_ / kGroup * value_group_;
  }

  const Item& item() const { return item_; }
  bool ended() const { return position_ >= item_.unit->end; }

  Place next() {
    const int64_t block = item_.unit->block(index_);
    const Place place{keys_ + block * cache_.key_block + offset_, values_ + block * cache_.value_block + value_offset_};
    position_ += kGroup;
    offset_ += kGroup, value_offset_ += value_group_;
    if (offset_ == cache_.block_size) offset_ = value_offset_ = 0, ++index_;
    return place;
  }

 private:
  const KvLayout& cache_;
  const int64_t value_group_;  // words from one group of a block to the next
  Item item_;
  const uint32_t *keys_ = nullptr, *values_ = nullptr;
  int64_t position_ = 0, index_ = 0, offset_ = 0, value_offset_ = 0;  // of the group after
};

// The groups of tokens that will be needed, in order, one step ahead of those that are worked on: through the rest of an
// item and into the one after it.
class Ahead {
 public:
  explicit Ahead(const KvLayout& cache) : walk_(cache) {}

  // `item` begins; `following` comes after it.
  void begin(const Item& item, const Item& following) {
    const Item& at = walk_.item();
    if (at.unit != item.unit || at.head != item.head)
      walk_.go_to(item, item.unit->begin / kGroup * kGroup + kStep);
    following_ = following;
  }

  // The next group, or `otherwise` where there is none.
  Place next(const Place& otherwise) {
    if (walk_.ended()) {
      if (following_.unit == nullptr) return otherwise;
      walk_.go_to(following_, following_.unit->begin / kGroup * kGroup);
      following_ = {};
    }
    return walk_.next();
  }

 private:
  Walk walk_;
  Item following_;
};

// A thread's memory for one item.
template <class Kind>
struct Room {
  Scratch heads, queries, out, scores, weights, edge, running, ranges;
};

// The queries of an item, and what they have attended to so far.
template <class Kind>
struct Attending {
  using Number = typename Kind::Number;

  int num_rows;                // query rows: tokens times heads of the group
  int64_t query_stride;        // numbers from one row of queries to the next
  const Number* queries;       // [num_rows][query_stride], zero behind the head's size
  const int32_t *low, *high;   // [num_rows] positions seen
  float* out;                  // [num_rows][value_row]
  Running* running;            // [num_rows]
};

// One step of the context: its groups of 16 tokens that are seen by anyone, and where each of its vectors lies.
struct Step {
  int64_t begin;
  int num_vectors;
  const uint32_t *keys[kStep / kLanes], *keys_ahead[kStep / kLanes];
  ValueRows values;
};

// `words` of a pair of tokens' values with one of them taken out: what an unused slot holds must not meet a weight of
// zero, since zero times NaN is NaN.
inline void keep_one(const uint32_t* words, int64_t count, bool second, uint32_t* to) {
  const uint32_t mask = second ? 0xffff0000u : 0xffffu;
  for (int64_t i = 0; i < count; ++i) to[i] = words[i] & mask;
}

// All rows of values of a step whose groups are all seen. They come from all groups in turn, as keys do: each group is a
// page or two of its own, and looking up several overlaps, as reading them does.
template <int kPack>
void take_all_values(int64_t stride, const Place* places, const Place* later, ValueRows& rows) {
  constexpr int kRows = kGroup / kPack;
  rows.count = kRows * kGroupsPerStep;
  for (int row = 0; row < kRows; ++row) {
    for (int group = 0; group < kGroupsPerStep; ++group) {
      const int i = row * kGroupsPerStep + group;
      rows.weight[i] = group * kRows + row;
      rows.values[i] = places[group].value + row * stride;
      rows.ahead[i] = later[group].value + row * stride;
    }
  }
}

// Likewise those that hold tokens [from, to) of a step of `num_groups` groups. A row of which one token is not seen is a
// copy in `edge`, which has room for two.
template <int kPack>
void take_values(int64_t stride, const Place* places, const Place* later, int num_groups, int64_t from, int64_t to,
                 uint32_t* edge, ValueRows& rows) {
  constexpr int kRows = kGroup / kPack;
  rows.count = 0;
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
      rows.ahead[i] = later[group].value + row * stride;
    }
  }
}

// The step that begins at `step_begin`, of a unit that sees positions [begin, end). `edge` has room for two rows of
// values.
template <int kPack>
void find_step(const KvLayout& cache, int64_t step_begin, int64_t begin, int64_t end, Walk& walk, Ahead& ahead,
               uint32_t* edge, Step& step) {
  constexpr int kVectors = kGroup / kLanes;  // of a group
  const int num_groups = static_cast<int>(std::min<int64_t>(kGroupsPerStep, (end - step_begin + kGroup - 1) / kGroup));
  step.begin = step_begin;
  step.num_vectors = num_groups * kVectors;
  Place places[kGroupsPerStep], later[kGroupsPerStep];
  for (int group = 0; group < num_groups; ++group) {
    places[group] = walk.next();
    later[group] = ahead.next(places[group]);
    for (int i = 0; i < kVectors; ++i) {
      step.keys[group * kVectors + i] = places[group].key + i * kLanes;
      step.keys_ahead[group * kVectors + i] = later[group].key + i * kLanes;
    }
  }
  if (begin <= step_begin && end >= step_begin + kStep)
    return take_all_values<kPack>(cache.value_row, places, later, step.values);
  take_values<kPack>(cache.value_row, places, later, num_groups, begin - step_begin, end - step_begin, edge, step.values);
}

// Lets the queries attend to positions [begin, end) of the table.
template <class Kind>
void attend(const KvLayout& cache, const ScoreFactors& factors, const Item& item, const Attending<Kind>& attending,
            Ahead& ahead, Products<Kind>& products, Room<Kind>& room) {
  using Number = typename Kind::Number;
  const Unit& unit = *item.unit;
  float* scores = room.scores.template get<float>(kInnerRows * kStep);
  constexpr int64_t kWeights = row_size<Kind>(kStep);
  Number* weights = room.weights.template get<Number>(kInnerRows * kWeights);
  uint32_t* edge = room.edge.template get<uint32_t>(2 * cache.value_row);
  float decay[kInnerRows];
  Step step;
  const int64_t first_position = unit.begin / kGroup * kGroup;
  Walk walk(cache);
  walk.go_to(item, first_position);
  for (int64_t begin = first_position; begin < unit.end; begin += kStep) {
    find_step<Kind::kPack>(cache, begin, unit.begin, unit.end, walk, ahead, edge, step);
    const int64_t step_end = begin + step.num_vectors * kLanes;
    for (int first = 0; first < attending.num_rows; first += kInnerRows) {
      const int num_rows = std::min(kInnerRows, attending.num_rows - first);
      const int32_t *low = attending.low + first, *high = attending.high + first;
      const bool unseen = unit.num_queries > 1 && (*std::min_element(low, low + num_rows) >= step_end ||
                                                   *std::max_element(high, high + num_rows) <= begin);
      if (unseen) continue;
      products.score(attending.queries + first * attending.query_stride, attending.query_stride, num_rows, step.keys,
                     step.keys_ahead, cache.block_size, cache.depth, step.num_vectors, scores);
      for (int i = 0; i < num_rows; ++i)
        decay[i] = weights_of<Kind>(scores + i * kStep, step.num_vectors, low[i] - begin, high[i] - begin, factors,
                                    {step.keys, cache.block_size, cache.depth}, attending.running[first + i],
                                    weights + i * kWeights);
      products.weigh(weights, num_rows, step.num_vectors, step.values, decay,
                     attending.out + first * cache.value_row, cache.value_row);
    }
  }
}

}  // namespace paged
