// Decode of many rows in the order in which their blocks lie in memory, not row by row: a block is met by whoever's it is.
//
// Blocks of 64 KB that lie anywhere are read at 0.75 to 0.85 of the rate of memory from end to end, since each is a page to
// look up and a stream to get ahead of anew. What a row has attended to so far is a fifth of a block, and waits in a cache.
#pragma once

#include "attend_blocks.h"

namespace paged {

// Takes stretches until none is left, and puts down what `thread` attended to, as its part of each row.
template <class Kind>
void walk(const Call& call, const Plan& plan, int thread, std::atomic<int64_t>& next, const typename Kind::Number* early,
          Room<Kind>& room) {
  const KvLayout& cache = call.cache;
  const auto num_stretches = static_cast<int64_t>(plan.stretches.size());
  const auto num_rows = static_cast<int32_t>(plan.walked.size());
  int32_t first_row = 0, end_row = 0, last_row = -1;
  Attending<Kind> rows[kMostWalked];
  bool begun[kMostWalked];
  const auto of = [&](int32_t row) {
    return Attended<Kind>(call, &plan.walked[row], 1, 0, cache.num_kv_heads, room, row - first_row,
                          std::min(num_rows, kMostWalked));
  };
  const auto put_parts = [&] {
    for (int32_t row = first_row; row < end_row; ++row) {
      if (!begun[row - first_row]) continue;
      call.results.unused[plan.walked[row].slot + thread] = false;
      for (int64_t head = 0; head < cache.num_kv_heads; ++head) of(row).finish(head, thread);
    }
  };
  for (int64_t at = next++, following; at < num_stretches; at = following) {
    following = next++;
    const Stretch& stretch = plan.stretches[at];
    if (end_row == 0 || stretch.first_row != first_row) {
      put_parts();
      first_row = stretch.first_row, end_row = std::min(first_row + kMostWalked, num_rows);
      std::fill(begun, begun + kMostWalked, false);
    }
    for (int32_t i = stretch.first; i < stretch.last; ++i) {
      const WalkedBlock& now = plan.blocks[i];
      const int32_t place = now.row - first_row;
      if (!begun[place]) {
        const Attended<Kind> attended = of(now.row);
        for (int64_t head = 0; head < cache.num_kv_heads; ++head)
          attended.begin(head, head + 1 < cache.num_kv_heads ? head + 1 : -1, early);
        rows[place] = attended.all_heads();
        begun[place] = true;
      }
      const Attending<Kind>& all = rows[place];
      BlockRead<Kind> read{cache.keys + now.block * cache.key_block, cache.values + now.block * cache.value_block};
      read.next = read.keys;
      read.cold = now.row != last_row;
      last_row = now.row;
      if (i + 1 < stretch.last) {
        const WalkedBlock& then = plan.blocks[i + 1];
        read.next = cache.keys + then.block * cache.key_block;
        if (then.row != now.row && begun[then.row - first_row]) read.next_queries = rows[then.row - first_row].queries;
      } else if (following < num_stretches) {
        read.next = cache.keys + plan.blocks[plan.stretches[following].first].block * cache.key_block;
      }
      with_rows(static_cast<int>(call.group), [&](auto m) {
        attend_block<Kind, m>(cache, call.factors, all, read, all.low[0] - now.position, all.high[0] - now.position, room);
      });
    }
  }
  put_parts();
}

}  // namespace paged
