// Decode block by block: the keys of all heads, their weights, the values of all heads, as a block has them in memory.
//
// The longer a piece is that is read from end to end, the faster memory gives it: on a Zen 5, of the rate of reading in order,
// 0.83 in pieces of 4 KB (one head's keys) that lie anywhere, 0.90 of 32 KB, 0.94 of 64 KB (a block of eight heads).
#pragma once

#include "attended.h"

namespace paged {

// Whether blocks are read so, by one query's `group` heads of each: where a step of 128 tokens would fetch near lines.
template <class Kind>
bool reads_blocks(const KvLayout& cache, int64_t group) {
  if (Products<Kind>::padded(1) != 1) return false;  // heads' rows do not follow each other
  return cache.num_kv_heads > 1 && cache.block_size == kGroup &&
         how_to_fetch<Kind>(cache, static_cast<int>(group)) == Fetch::near;
}

// All heads of one query.
template <class Kind>
bool reads_blocks(const Call& call, const Item& item) {
  return item.unit->num_queries == 1 && item.last_head - item.first_head == call.cache.num_kv_heads &&
         reads_blocks<Kind>(call.cache, call.group);
}

// out = out * decay[m] + weights x all of a head's values in a block, for N vectors of columns; fetches as many lines
// from `ahead` on.
template <class Kind, int M, int N>
__attribute__((always_inline)) inline void weigh_part(const typename Kind::Number* weights, const uint32_t* values,
                                                      const uint32_t* ahead, int64_t value_row, const float* decay,
                                                      float* out) {
  Vec sums[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sums[m][n] = Vec::loadu(out + m * value_row + n * kLanes) * Vec(decay[m]);
  for (int row = 0; row < kGroup / Kind::kPack; ++row, values += value_row, ahead += value_row) {
    const uint32_t* words[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      words[n] = values + n * kLanes;
      if (n * kLanes % kGroup == 0) fetch<Fetch::next>(ahead + n * kLanes);
    }
    add_products<Kind>(weights, kStep, row, words, sums);
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) sums[m][n].store(out + m * value_row + n * kLanes);
}

// Where a block's keys and values begin, and what is read after it: keys, and the queries of another row, if it is one's.
template <class Kind>
struct BlockRead {
  const uint32_t *keys, *values, *next;
  bool cold = false;  // what its row has attended to was last used some blocks ago
  const typename Kind::Number* next_queries = nullptr;
};

// Scores of a block's tokens, `num_rows` rows of at most kLanes, become their weights.
template <class Kind>
void weigh_tokens(float* scores, int num_rows, int64_t low, int64_t high, const ScoreFactors& factors, Running* running,
                  typename Kind::Number* weights, float* decays) {
  constexpr int kVectors = kGroup / kLanes;
  const bool whole = low <= 0 && high >= kGroup;
  const Vec first(static_cast<float>(low)), end(static_cast<float>(high)), nothing(kMinusInfinity);
  Vec exponents[kLanes][kVectors], largest[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    largest[i] = nothing;
    Vec token = Vec::arange(0.f, 1.f);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v, token = token + Vec(static_cast<float>(kLanes))) {
      Vec x = factors(Vec::loadu(scores + i * kStep + v * kLanes));
      if (!whole) x = Vec::blendv(nothing, x, (token >= first) & (token < end));
      exponents[i][v] = x;
      largest[i] = at::vec::clamp_min(x, largest[i]);
    }
  }
  float tops[kLanes];
  max_of_each(largest).store(tops);
  const Origins<kLanes> origins(tops, num_rows, running);
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (i >= num_rows) break;
    Vec sums = Vec::loadu(running[i].sums) * Vec(origins.decay[i]);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      const Vec weight = exp2(exponents[i][v] - Vec(origins.origin[i]));
      sums = sums + weight;
      Kind::store(weights + i * row_size<Kind>(kStep) + v * kLanes, weight);
    }
    sums.store(running[i].sums);
  }
  Vec::loadu(origins.decay).store(decays, num_rows);
}

// Lets the queries of all heads, M of each, attend to a block of which they see tokens [low, high).
template <class Kind, int M>
void attend_block(const KvLayout& cache, const ScoreFactors& factors, const Attending<Kind>& all,
                  const BlockRead<Kind>& read, int64_t low, int64_t high, Room<Kind>& room) {
  using Number = typename Kind::Number;
  constexpr int64_t kWeights = row_size<Kind>(kStep);
  constexpr int kVectors = kGroup / kLanes;
  const int num_rows = (all.num_rows + kLanes - 1) / kLanes * kLanes;  // the last ones are not used
  float* scores = room.scores.template get<float>(num_rows * kStep);
  Number* weights = room.weights.template get<Number>(all.num_rows * kWeights);
  float* decays = room.decays.template get<float>(all.num_rows);
  const int num_heads = all.num_rows / M;
  for (int head = 0; head < num_heads; ++head) {
    if (read.cold) {
      expect_bytes(all.running + head * M, M * static_cast<int64_t>(sizeof(Running)));
      expect_bytes(all.out + head * M * cache.value_row, M * cache.value_row * static_cast<int64_t>(sizeof(float)));
    }
    const uint32_t* const part = read.keys + head * cache.key_head;
    const uint32_t* const following = head + 1 < num_heads ? part + cache.key_head : read.values;
    const uint32_t *keys[kVectors], *ahead[kVectors];
    for (int i = 0; i < kVectors; ++i) keys[i] = part + i * kLanes, ahead[i] = following + i * kLanes;
    score_block<Kind, M, kVectors, Fetch::next>(all.queries + head * M * all.query_stride, all.query_stride, keys, ahead,
                                                kGroup, cache.depth, scores + head * M * kStep);
  }
  for (int first = 0; first < all.num_rows; first += kLanes)
    weigh_tokens<Kind>(scores + first * kStep, std::min(kLanes, all.num_rows - first), low, high, factors,
                       all.running + first, weights + first * kWeights, decays + first);
  uint32_t* edge = room.edge.template get<uint32_t>(2 * cache.value_row);
  for (int head = 0; head < num_heads; ++head) {
    if (read.next_queries != nullptr)
      expect_bytes(read.next_queries + head * M * all.query_stride,
                   M * all.query_stride * static_cast<int64_t>(sizeof(Number)));
    const uint32_t* const part = read.values + head * cache.value_head;
    const uint32_t* const following = head + 1 < num_heads ? part + cache.value_head : read.next;
    const bool whole = low <= 0 && high >= kGroup;
    ValueRows rows;
    const Place place{nullptr, part};
    if (!whole)
      take_values<Kind::kPack>(cache.value_row, &place, &place, 1, std::max<int64_t>(0, low), high, edge, Fetch::none,
                               rows);
    in_blocks<weigh_width(M)>(0, static_cast<int>(cache.value_row) / kLanes, [&](auto n, int vector) {
      const int64_t column = vector * kLanes;
      const Number* of_head = weights + head * M * kWeights;
      float* out = all.out + head * M * cache.value_row + column;
      if (whole) {
        weigh_part<Kind, M, n>(of_head, part + column, following + column, cache.value_row, decays + head * M, out);
      } else {
        weigh_block<Kind, M, n, Fetch::none>(of_head, rows, 0, rows.count, column, decays + head * M, out, cache.value_row);
      }
    });
  }
}

// All of an item for which reads_blocks is true.
template <class Kind>
void do_blocks(const Call& call, const Plan& plan, const Item& item, const Item& following,
               const typename Kind::Number* early, Room<Kind>& room) {
  const KvLayout& cache = call.cache;
  const Unit& unit = *item.unit;
  const Attended<Kind> attended(call, plan, item, room);
  for (int64_t head = item.first_head; head < item.last_head; ++head)
    attended.begin(head, head + 1 < item.last_head ? head + 1 : -1, early);
  const Attending<Kind> all = attended.all_heads();
  const auto keys_of = [&](const Unit& of, int64_t position) {
    return cache.keys + of.block(position / cache.block_size) * cache.key_block;
  };
  const uint32_t* keys = keys_of(unit, item.first_position());
  for (int64_t begin = item.first_position(); begin < unit.end; begin += kGroup) {
    BlockRead<Kind> read{keys, cache.values + unit.block(begin / kGroup) * cache.value_block, keys};
    if (begin + kGroup < unit.end) {
      read.next = keys_of(unit, begin + kGroup);
    } else if (following.unit != nullptr) {
      read.next = keys_of(*following.unit, following.first_position());
    }
    with_rows(attended.num_rows(), [&](auto m) {
      attend_block<Kind, m>(cache, call.factors, all, read, all.low[0] - begin, all.high[0] - begin, room);
    });
    keys = read.next;
  }
  for (int64_t head = item.first_head; head < item.last_head; ++head) attended.finish(head);
}

}  // namespace paged
