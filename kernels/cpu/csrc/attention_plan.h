// How a call's attention is cut into units of work, each for one KV head after another.
#pragma once

#include <cstdint>
#include <vector>

namespace paged {

// A query token and the positions [low, high) of its row that it sees within its unit. `slot` numbers the place of the
// partial result where a token's context is in several units; -1 where the unit's result is the token's.
struct QueryToken {
  int32_t token, low, high, slot;
  bool alone;  // its row has no other query in this call
};

// Query tokens that see positions [begin, end) of one table.
struct Unit {
  const int32_t* table;  // null: the row lies in one piece, from block `first_block` on
  int64_t first_block;
  int64_t begin, end;
  int32_t first_query, num_queries;

  int64_t block(int64_t index) const { return table != nullptr ? table[index] : first_block + index; }
};

// One of the blocks of a walk: where it lies, the number of the row it is of, and its first position there.
struct WalkedBlock {
  int32_t block, row, position;
};

// Blocks [first, last) of a walk, which a thread takes at once. Its rows are the kMostWalked from `first_row` on.
struct Stretch {
  int32_t first, last, first_row;
};

constexpr int32_t kMostWalked = 128;  // rows: what each of them has attended to stays in some cache until its next block

struct PlanSizes {
  int64_t num_tokens;
  int64_t group;  // query heads of a KV head
  int64_t num_kv_heads, block_size;
};

// What a plan is made of; without tables each row lies in one piece, row r from block r * table_stride on. Rows and
// segments as in kernels/attention.py and kernels/shared_blocks.py.
struct Batch : PlanSizes {
  int64_t num_rows, table_stride;
  const int32_t *tables, *query_start, *context_lens;
  int64_t window;  // 0: none
  bool walks;      // rows of one query may be walked
  int64_t num_segments;
  const int32_t *segment_first, *segment_end, *segment_row_start, *segment_rows, *own_start;  // null: nothing is shared
};

constexpr int kMostQueries = 128;  // heads times tokens of a unit, unless one token alone has more heads

// Serves every call over the same rows with these sizes and the same window; it looks into the batch's tables.
struct Plan {
  PlanSizes sizes;
  std::vector<Unit> units;
  std::vector<QueryToken> queries;
  std::vector<int32_t> blank_tokens;  // those without a key: their results are zeros
  // Tokens whose context is in several units; of token i the slots are merge_start[i] : merge_start[i + 1].
  std::vector<int32_t> merged_tokens, merge_start;
  int32_t num_slots = 0;
  // Rows of one query whose blocks are read in the order in which they lie, whoever's they are: memory gives the most when
  // it is read from end to end. Each of the threads has attended to a part of each row then, in slots of its own: of
  // thread i it is the i-th from the query's on.
  std::vector<QueryToken> walked;
  std::vector<WalkedBlock> blocks;
  std::vector<Stretch> stretches;
  int32_t num_walkers = 0;
  // Tokens that are not both alone and wholly in one unit: what is to be known of them must be so before any unit begins.
  std::vector<int32_t> early_tokens;

  // Units are made small enough that `num_threads` threads have about as much to do each.
  void make(const Batch& batch, int num_threads);

 private:
  void add_rows(const Batch& batch);
  void add_segments(const Batch& batch);
  void add(const Batch& batch, int64_t row, int64_t begin, int64_t end, int32_t first_query);
  void take_walks(const Batch& batch, int num_threads);
  void cut(const Batch& batch, int num_threads);
  void number_slots(const Batch& batch);

  std::vector<Unit> whole_;
  std::vector<char> in_one_unit_, is_walked_;
  std::vector<int32_t> num_parts_, slot_of_token_;
};

}  // namespace paged
