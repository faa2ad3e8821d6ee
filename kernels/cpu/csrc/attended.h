// Queries of a call as its items take them, from where they are given or projected, and what becomes of each.
#pragma once

#include "attend.h"
#include "attention_plan.h"
#include "heads.h"
#include "kv_write.h"
#include "results.h"

namespace paged {

// Where a call's queries come from: as they are given, or from a projection, whose keys and values are written, too.
struct Call {
  KvLayout cache;
  Results results;
  ScoreFactors factors;
  int64_t group, key_dim;
  const Heads* queries;
  const Projected* projected;
  const int64_t* slots;  // of projected tokens
};

// The key and value of one head of a projected token into their slot. `room` is for two heads.
inline void write_projected(const Call& call, int64_t token, int64_t head, float* room) {
  float* value = room + call.key_dim;
  call.projected->key(token, head, room);
  call.projected->value(token, head, value);
  write_slot(call.cache, call.slots[token], head, room, call.key_dim, value);
}

// Likewise of `token` and `next`, where their slots share words of values; false where they do not. `room` is for four heads.
inline bool write_projected(const Call& call, int64_t token, int64_t next, int64_t head, float* room) {
  const int64_t slot = call.slots[token];
  if (call.cache.pack != 2 || slot % 2 || call.slots[next] != slot + 1) return false;
  float* values = room + 2 * call.key_dim;
  call.projected->key(token, head, room);
  call.projected->key(next, head, room + call.key_dim);
  call.projected->value(token, head, values);
  call.projected->value(next, head, values + call.cache.value_dim);
  write_pair(call.cache, slot, head, room, call.key_dim, values);
  return true;
}

// Numbers of a row of queries, whose memory is a multiple of 32.
template <class Kind>
int64_t query_row(const Call& call) {
  return (row_size<Kind>(call.cache.depth * Kind::kPack) + 31) / 32 * 32;
}

// A row of queries, with zeros behind the head's size.
template <class Kind>
void put_query(const Call& call, const float* from, typename Kind::Number* to) {
  const int64_t size = call.cache.depth * Kind::kPack;
  if constexpr (Kind::kPack == 4) {
    Kind::put_row(from, call.key_dim, size, to);
  } else {
    narrow(from, call.key_dim, to);
    std::memset(to + call.key_dim, 0, (size - call.key_dim) * sizeof(*to));
  }
}

// `early`: rows of projected queries that were made before, [token][head].
template <class Kind>
void load_query(const Call& call, const QueryToken& query, int64_t head, const typename Kind::Number* early,
                float* room, typename Kind::Number* to) {
  using Number = typename Kind::Number;
  if (call.projected != nullptr) {
    if (!query.alone || query.slot >= 0) {
      const int64_t row = query_row<Kind>(call);
      std::memcpy(to, early + (query.token * call.results.num_heads + head) * row, row * sizeof(Number));
    } else {
      call.projected->query(query.token, head, room);
      put_query<Kind>(call, room, to);
    }
    return;
  }
  call.queries->with(query.token, head, [&](const auto* from) {
    using From = std::remove_cv_t<std::remove_reference_t<decltype(*from)>>;
    if constexpr (std::is_same_v<From, Number> && Kind::kPack != 4) {
      std::memcpy(to, from, call.key_dim * sizeof(Number));
      std::memset(to + call.key_dim, 0, (call.cache.depth * Kind::kPack - call.key_dim) * sizeof(Number));
    } else {
      widen(from, call.key_dim, room);
      put_query<Kind>(call, room, to);
    }
  });
}

constexpr int kHeadsAhead = 4;  // of a call's input, so many are fetched before they are needed

// Fetches what load_query will read.
template <class Kind>
__attribute__((always_inline)) inline void expect_query(const Call& call, const QueryToken& query, int64_t head,
                                                        const typename Kind::Number* early) {
  if (call.projected == nullptr) return call.queries->expect(query.token, head);
  if (query.alone && query.slot < 0) return call.projected->expect_query(query.token, head);
  const int64_t row = query_row<Kind>(call);
  expect_bytes(early + (query.token * call.results.num_heads + head) * row, row * static_cast<int64_t>(sizeof(*early)));
}

// Of each head of an item the queries, and what they have attended to so far.
template <class Kind>
class Attended {
 public:
  using Number = typename Kind::Number;

  Attended(const Call& call, const Plan& plan, const Item& item, Room<Kind>& room)
      : Attended(call, plan.queries.data() + item.unit->first_query, item.unit->num_queries, item.first_head,
                 item.last_head, room) {}

  // In a room for `num_places` such, the one at `place`.
  Attended(const Call& call, const QueryToken* tokens, int64_t num_tokens, int64_t first_head, int64_t last_head,
           Room<Kind>& room, int64_t place = 0, int64_t num_places = 1)
      : call_(call),
        tokens_(tokens),
        first_head_(first_head),
        num_heads_(static_cast<int>(last_head - first_head)),
        num_rows_(static_cast<int>(num_tokens * call.group)),
        padded_(Products<Kind>::padded(num_rows_)),
        query_row_(query_row<Kind>(call)) {
    const int64_t value_row = call.cache.value_row;
    head_room_ = room.heads.template get<float>(2 * std::max(call.key_dim, value_row));
    const auto take = [&](Scratch& of, auto type, int64_t count) {
      return of.get<decltype(type)>(num_places * count) + place * count;
    };
    running_ = take(room.running, Running(), num_heads_ * num_rows_);
    out_ = take(room.out, float(), num_heads_ * padded_ * value_row);
    queries_ = take(room.queries, Number(), num_heads_ * padded_ * query_row_);
    low_ = take(room.ranges, int32_t(), 2 * num_rows_);
    for (int row = 0; row < num_rows_; ++row)
      low_[row] = token(row).low, low_[num_rows_ + row] = token(row).high;
  }

  int num_rows() const { return num_rows_; }

  Attending<Kind> of(int64_t head) const {
    const int64_t i = head - first_head_;
    return {num_rows_,
            query_row_,
            queries_ + i * padded_ * query_row_,
            low_,
            low_ + num_rows_,
            out_ + i * padded_ * call_.cache.value_row,
            running_ + i * num_rows_};
  }

  // The rows of all its heads, one head's after the other's; of kinds that do not pad them.
  Attending<Kind> all_heads() const {
    Attending<Kind> attending = of(first_head_);
    attending.num_rows *= num_heads_;
    return attending;
  }

  // Before the first step. `early`: as load_query takes it; `next`: the head that begins after this one, or -1.
  void begin(int64_t head, int64_t next, const Number* early) const {
    const bool writes = call_.projected != nullptr && tokens_[0].alone && tokens_[0].slot < 0;
    if (next >= 0) {
      if (writes) call_.projected->expect_key_and_value(tokens_[0].token, next);
      for (int row = 0; row < std::min(num_rows_, kHeadsAhead); ++row)
        expect_query<Kind>(call_, token(row), query_head(next, row), early);
    }
    if (writes) {
      expect_slot(call_.cache, call_.slots[tokens_[0].token], head);
      write_projected(call_, tokens_[0].token, head, head_room_);
    }
    const Attending<Kind> attending = of(head);
    std::memset(attending.out, 0, num_rows_ * call_.cache.value_row * sizeof(float));
    for (int row = 0; row < num_rows_; ++row) {
      const int later = row + kHeadsAhead;
      if (later < num_rows_) expect_query<Kind>(call_, token(later), query_head(head, later), early);
      attending.running[row].clear();
      load_query<Kind>(call_, token(row), query_head(head, row), early, head_room_, attending.queries + row * query_row_);
    }
  }

  // After the last one. A token in parts has `part` of them behind its slot.
  void finish(int64_t head, int64_t part = 0) const {
    const Attending<Kind> attending = of(head);
    for (int row = 0; row < num_rows_; ++row) {
      const QueryToken& query = token(row);
      const float *values = attending.out + row * call_.cache.value_row, sum = attending.running[row].sum();
      if (query.slot < 0) {
        call_.results.finish(query.token, query_head(head, row), values, attending.running[row].largest, sum);
      } else {
        call_.results.put_part(query.slot + part, query_head(head, row), values, attending.running[row].largest, sum);
      }
    }
  }

 private:
  const QueryToken& token(int row) const { return tokens_[row / call_.group]; }
  int64_t query_head(int64_t head, int row) const { return head * call_.group + row % call_.group; }

  const Call& call_;
  const QueryToken* tokens_;
  const int64_t first_head_;
  const int num_heads_, num_rows_, padded_;
  const int64_t query_row_;
  float *head_room_, *out_;
  Running* running_;
  Number* queries_;
  int32_t* low_;
};

}  // namespace paged
