#include "attention_plan.h"

#include <algorithm>

namespace paged {
namespace {

constexpr int64_t kLeastPart = 256;      // positions: a part costs a merge
constexpr int64_t kMostDecoded = 1024;    // positions of a unit with one query: threads that share a row then end together
constexpr int64_t kUnitsPerThread = 4;    // so that whoever is late is late by little
constexpr int64_t kLeastWalked = 8;       // blocks of each part: a part costs room in caches and a merge
constexpr int32_t kStretch = 8;           // blocks
constexpr int64_t kReadCost = 4;          // of a position's keys and values, in queries that attend to it

int64_t cost(const Unit& unit, int64_t group) { return (unit.end - unit.begin) * (kReadCost + unit.num_queries * group); }

}  // namespace

void Plan::make(const Batch& batch, int num_threads) {
  sizes = batch;
  whole_.clear(), queries.clear(), blank_tokens.clear();
  for (int64_t token = batch.query_start[batch.num_rows]; token < batch.num_tokens; ++token)
    blank_tokens.push_back(static_cast<int32_t>(token));
  add_segments(batch);
  add_rows(batch);
  take_walks(batch, num_threads);
  cut(batch, num_threads);
  number_slots(batch);
}

void Plan::add_rows(const Batch& batch) {
  const int64_t most_tokens = std::max<int64_t>(1, kMostQueries / batch.group);
  for (int64_t row = 0; row < batch.num_rows; ++row) {
    const int64_t first = batch.query_start[row], last = batch.query_start[row + 1];
    const int64_t context = batch.context_lens[row], own = batch.own_start ? batch.own_start[row] * batch.block_size : 0;
    for (int64_t begin = first; begin < last; begin += most_tokens) {
      const int64_t end = std::min(begin + most_tokens, last);
      const auto first_query = static_cast<int32_t>(queries.size());
      for (int64_t token = begin; token < end; ++token) {
        const int64_t high = context - (last - 1 - token);
        const int64_t low = std::max<int64_t>(own, batch.window ? high - batch.window : 0);
        if (high <= 0) {
          blank_tokens.push_back(static_cast<int32_t>(token));
        } else if (low < high) {
          queries.push_back({static_cast<int32_t>(token), static_cast<int32_t>(low), static_cast<int32_t>(high), -1,
                             last - first == 1});
        }
      }
      add(batch, row, own, context, first_query);
    }
  }
}

void Plan::add_segments(const Batch& batch) {
  const int64_t most_tokens = std::max<int64_t>(1, kMostQueries / batch.group);
  for (int64_t segment = 0; segment < batch.num_segments; ++segment) {
    const int32_t* rows = batch.segment_rows + batch.segment_row_start[segment];
    const int64_t num_rows = batch.segment_row_start[segment + 1] - batch.segment_row_start[segment];
    const int64_t begin = batch.segment_first[segment] * batch.block_size;
    const int64_t end = batch.segment_end[segment] * batch.block_size;
    for (int64_t i = 0; i < num_rows; i += most_tokens) {
      const auto first_query = static_cast<int32_t>(queries.size());
      for (int64_t j = i; j < std::min(i + most_tokens, num_rows); ++j) {
        const int64_t context = batch.context_lens[rows[j]];
        const int64_t high = std::min(context, end);
        const int64_t low = std::max<int64_t>(begin, batch.window ? context - batch.window : 0);
        if (low < high)
          queries.push_back(
              {batch.query_start[rows[j]], static_cast<int32_t>(low), static_cast<int32_t>(high), -1, true});
      }
      add(batch, rows[0], begin, end, first_query);
    }
  }
}

// A unit of the queries from `first_query` on, over what they see of [begin, end).
void Plan::add(const Batch& batch, int64_t row, int64_t begin, int64_t end, int32_t first_query) {
  const auto num_queries = static_cast<int32_t>(queries.size()) - first_query;
  if (num_queries == 0) return;
  int64_t low = end, high = begin;
  for (int32_t i = first_query; i < first_query + num_queries; ++i) {
    low = std::min<int64_t>(low, queries[i].low);
    high = std::max<int64_t>(high, queries[i].high);
  }
  const int64_t first_block = row * batch.table_stride;
  const int32_t* table = batch.tables ? batch.tables + first_block : nullptr;
  whole_.push_back({table, first_block, low, high, first_query, num_queries});
}

// Of the units those of rows with one query become walks, if they have enough blocks for each of the threads.
void Plan::take_walks(const Batch& batch, int num_threads) {
  walked.clear(), blocks.clear(), stretches.clear();
  num_walkers = num_threads;
  if (!batch.walks) return;
  const auto walks = [&](const Unit& unit) { return unit.num_queries == 1 && queries[unit.first_query].alone; };
  const auto first_block = [&](const Unit& unit) { return unit.begin / batch.block_size; };
  const auto end_block = [&](const Unit& unit) { return (unit.end + batch.block_size - 1) / batch.block_size; };
  int64_t num_blocks = 0, num_parts = 0;
  for (const Unit& unit : whole_) {
    if (!walks(unit)) continue;
    num_blocks += end_block(unit) - first_block(unit);
    num_parts += std::min<int64_t>(end_block(unit) - first_block(unit), num_threads);
  }
  if (num_blocks == 0 || num_blocks < kLeastWalked * num_parts) return;
  std::vector<Unit> others;
  for (const Unit& unit : whole_) {
    if (!walks(unit)) {
      others.push_back(unit);
      continue;
    }
    const auto row = static_cast<int32_t>(walked.size());
    walked.push_back(queries[unit.first_query]);
    for (int64_t i = first_block(unit); i < end_block(unit); ++i)
      blocks.push_back({static_cast<int32_t>(unit.block(i)), row, static_cast<int32_t>(i * batch.block_size)});
  }
  whole_ = std::move(others);
  const auto lies_before = [](const WalkedBlock& a, const WalkedBlock& b) { return a.block < b.block; };
  for (auto begin = blocks.begin(); begin != blocks.end();) {
    const int32_t first_row = begin->row;
    const auto end = std::find_if(begin, blocks.end(), [&](const auto& of) { return of.row >= first_row + kMostWalked; });
    std::sort(begin, end, lies_before);
    const auto first = static_cast<int32_t>(begin - blocks.begin()), last = static_cast<int32_t>(end - blocks.begin());
    for (int32_t i = first; i < last; i += kStretch) stretches.push_back({i, std::min(i + kStretch, last), first_row});
    begin = end;
  }
}

void Plan::cut(const Batch& batch, int num_threads) {
  int64_t total = 0;
  for (const Unit& unit : whole_) total += cost(unit, batch.group) * batch.num_kv_heads;
  const int64_t most = num_threads > 1 ? total / (num_threads * kUnitsPerThread) + 1 : total + 1;
  units.clear();
  for (const Unit& unit : whole_) {
    const int64_t length = unit.end - unit.begin;
    const int64_t least = num_threads > 1 && unit.num_queries == 1 ? (length + kMostDecoded - 1) / kMostDecoded : 1;
    const int64_t parts =
        std::clamp<int64_t>((cost(unit, batch.group) + most - 1) / most, least, length / kLeastPart + 1);
    // Parts begin where a block of 64 positions does.
    const int64_t part = ((length + parts - 1) / parts + 63) / 64 * 64;
    for (int64_t begin = unit.begin; begin < unit.end;) {
      const int64_t end = parts == 1 ? unit.end : std::min(unit.end, (begin + part) / 64 * 64);
      units.push_back({unit.table, unit.first_block, begin, end, unit.first_query, unit.num_queries});
      begin = end;
    }
  }
  std::stable_sort(units.begin(), units.end(),
                   [&](const Unit& a, const Unit& b) { return cost(a, batch.group) > cost(b, batch.group); });
}

// Units that share a token's context get queries of their own, each with a slot.
void Plan::number_slots(const Batch& batch) {
  num_parts_.assign(batch.num_tokens, 0);
  for (const Unit& unit : units)
    for (int32_t i = 0; i < unit.num_queries; ++i) ++num_parts_[queries[unit.first_query + i].token];
  is_walked_.assign(batch.num_tokens, 0);
  for (const QueryToken& query : walked) is_walked_[query.token] = 1, num_parts_[query.token] += num_walkers;
  merged_tokens.clear(), merge_start.clear();
  slot_of_token_.assign(batch.num_tokens, -1);
  num_slots = 0;
  for (int64_t token = 0; token < batch.num_tokens; ++token) {
    if (num_parts_[token] < 2 && !is_walked_[token]) continue;
    merged_tokens.push_back(static_cast<int32_t>(token));
    merge_start.push_back(num_slots);
    slot_of_token_[token] = num_slots;
    num_slots += num_parts_[token];
  }
  merge_start.push_back(num_slots);
  in_one_unit_.assign(batch.num_tokens, 0);
  for (const QueryToken& query : queries)
    in_one_unit_[query.token] = query.alone && num_parts_[query.token] == 1 && !is_walked_[query.token];
  early_tokens.clear();
  for (int64_t token = 0; token < batch.num_tokens; ++token)
    if (!in_one_unit_[token]) early_tokens.push_back(static_cast<int32_t>(token));
  if (num_slots == 0) return;
  std::vector<QueryToken> numbered;
  for (Unit& unit : units) {
    const auto first = static_cast<int32_t>(numbered.size());
    for (int32_t i = 0; i < unit.num_queries; ++i) {
      QueryToken query = queries[unit.first_query + i];
      if (slot_of_token_[query.token] >= 0) query.slot = slot_of_token_[query.token]++;
      numbered.push_back(query);
    }
    unit.first_query = first;
  }
  queries = std::move(numbered);
  for (QueryToken& query : walked) {
    query.slot = slot_of_token_[query.token];
    slot_of_token_[query.token] += num_walkers;
  }
}

}  // namespace paged
