// Attention of some queries over a part of one table: the loop over the context that every kind of work goes through.
#pragma once

#include <algorithm>
#include <cstring>

#include "attention_plan.h"
#include "kv_layout.h"
#include "scratch.h"
#include "softmax.h"

namespace paged {

constexpr int kInnerRows = 64;  // query rows whose scores are held at once

// Where a group of tokens of one KV head lies.
struct Place {
  const uint32_t *key, *value;
};

inline Place locate(const KvLayout& cache, const int32_t* table, int64_t head, int64_t position) {
  const int64_t block = table[position / cache.block_size], offset = position % cache.block_size;
  return {cache.key(block, head, offset), cache.value(block, head, offset)};
}

// A unit for one KV head.
struct Item {
  const Unit* unit = nullptr;
  int64_t head = 0;
};

// The groups of tokens that will be needed, in order, some way ahead of those that are worked on: through the rest of
// an item and into the one after it.
class Ahead {
 public:
  explicit Ahead(const KvLayout& cache) : cache_(cache) {}

  // `item` begins; `following` comes after it.
  void begin(const Item& item, const Item& following) {
    if (item_.unit != item.unit || item_.head != item.head) go_to(item, kStep);
    following_ = following;
  }

  // The next group, or `otherwise` where there is none.
  Place next(const Place& otherwise) {
    if (position_ >= item_.unit->end) {
      if (following_.unit == nullptr) return otherwise;
      go_to(following_, 0);
      following_ = {};
    }
    const Place place = locate(cache_, item_.unit->table, item_.head, position_);
    position_ += kGroup;
    return place;
  }

 private:
  void go_to(const Item& item, int64_t distance) {
    item_ = item;
    position_ = item.unit->begin / kGroup * kGroup + distance;
  }

  const KvLayout& cache_;
  Item item_, following_;
  int64_t position_ = 0;
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
  int first, last;  // vectors
  const uint32_t *keys[kStep / kLanes], *keys_ahead[kStep / kLanes];
  Run runs[2 * kGroupsPerStep];
  int num_runs = 0;
};

// `words` of a pair of tokens' values with one of them taken out: what an unused slot holds must not meet a weight of
// zero, since zero times NaN is NaN.
inline void keep_one(const uint32_t* words, int64_t count, bool second, uint32_t* to) {
  const uint32_t mask = second ? 0xffff0000u : 0xffffu;
  for (int64_t i = 0; i < count; ++i) to[i] = words[i] & mask;
}

// `edge` has room for two rows of values.
inline Step find_step(const KvLayout& cache, const int32_t* table, int64_t head, int64_t step_begin, int64_t begin,
                      int64_t end, Ahead& ahead, uint32_t* edge) {
  Step step;
  step.begin = step_begin;
  constexpr int kVectors = kGroup / kLanes;  // of a group
  const int last = static_cast<int>(std::min<int64_t>(kGroupsPerStep, (end - step_begin + kGroup - 1) / kGroup));
  step.first = 0;
  step.last = last * kVectors;
  const int64_t pack = cache.pack;
  for (int group = 0; group < last; ++group) {
    const int64_t position = step_begin + group * kGroup;
    const Place place = locate(cache, table, head, position);
    const Place later = ahead.next(place);
    for (int i = 0; i < kVectors; ++i) {
      step.keys[group * kVectors + i] = place.key + i * kLanes;
      step.keys_ahead[group * kVectors + i] = later.key + i * kLanes;
    }
    // Rows of values, each of `pack` tokens: those that are seen whole, and up to two that are seen by half.
    const int64_t from = std::max<int64_t>(0, begin - position), to = std::min<int64_t>(kGroup, end - position);
    const int64_t first_row = (from + pack - 1) / pack, last_row = to / pack, row_of_group = group * kGroup / pack;
    if (from % pack) {
      keep_one(place.value + (first_row - 1) * cache.value_row, cache.value_row, true, edge);
      step.runs[step.num_runs++] = {edge, edge, static_cast<int>(row_of_group + first_row - 1), 1};
    }
    if (first_row < last_row) {
      step.runs[step.num_runs++] = {place.value + first_row * cache.value_row, later.value + first_row * cache.value_row,
                                    static_cast<int>(row_of_group + first_row), static_cast<int>(last_row - first_row)};
    }
    if (to % pack && to > from) {
      uint32_t* row = edge + cache.value_row;
      keep_one(place.value + last_row * cache.value_row, cache.value_row, false, row);
      step.runs[step.num_runs++] = {row, row, static_cast<int>(row_of_group + last_row), 1};
    }
  }
  return step;
}

// Lets the queries attend to positions [begin, end) of the table.
template <class Kind>
void attend(const KvLayout& cache, const ScoreFactors& factors, const Item& item, const Attending<Kind>& attending,
            Ahead& ahead, Room<Kind>& room) {
  using Number = typename Kind::Number;
  const Unit& unit = *item.unit;
  float* scores = room.scores.template get<float>(kInnerRows * kStep);
  Number* weights = room.weights.template get<Number>(kInnerRows * kStep);
  uint32_t* edge = room.edge.template get<uint32_t>(2 * cache.value_row);
  float decay[kInnerRows];
  for (int64_t begin = unit.begin / kGroup * kGroup; begin < unit.end; begin += kStep) {
    const Step step = find_step(cache, unit.table, item.head, begin, unit.begin, unit.end, ahead, edge);
    for (int first = 0; first < attending.num_rows; first += kInnerRows) {
      const int num_rows = std::min(kInnerRows, attending.num_rows - first);
      const int32_t *low = attending.low + first, *high = attending.high + first;
      const int64_t step_end = begin + step.last * kLanes;
      if (*std::min_element(low, low + num_rows) >= step_end || *std::max_element(high, high + num_rows) <= begin)
        continue;
      score<Kind>(attending.queries + first * attending.query_stride, attending.query_stride, num_rows, step.keys,
                  step.keys_ahead, cache.block_size, cache.depth, step.first, step.last, scores);
      for (int i = 0; i < num_rows; ++i)
        decay[i] = weights_of<Kind>(scores + i * kStep, step.first, step.last, low[i] - begin, high[i] - begin, factors,
                                    attending.running[first + i], weights + i * kStep);
      weigh<Kind>(weights, num_rows, step.runs, step.num_runs, cache.value_row, decay,
                  attending.out + first * cache.value_row, cache.value_row);
    }
  }
}

}  // namespace paged
