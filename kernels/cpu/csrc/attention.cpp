// paged_attention and attend_projected: do what was planned on all threads, put together what was done in parts.
#include "attention.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <memory>

#include "walk.h"
#include "parallel.h"
#include "strides.h"

namespace paged {
namespace {

// Step by step through the item's part of the context, and head by head through each step. `groups` are those of its first
// step, and become those of the first of `following`.
template <class Kind>
void do_item(const Call& call, const Plan& plan, const Item& item, const Item& following,
             const typename Kind::Number* early, Groups& groups, Products<Kind>& products, Room<Kind>& room) {
  const KvLayout& cache = call.cache;
  const Attended<Kind> attended(call, plan, item, room);
  uint32_t* edge = room.edge.template get<uint32_t>(2 * cache.value_row);
  const Fetch how = how_to_fetch<Kind>(cache, attended.num_rows());
  const Unit& unit = *item.unit;
  Step step;
  for (int64_t begin = item.first_position(); begin < unit.end; begin += kStep) {
    const bool last = begin + kStep >= unit.end;
    Groups later;
    if (!last) {
      later.find(cache, item, begin + kStep);
    } else if (following.unit != nullptr) {
      later.find(cache, following, following.first_position());
    }
    for (int64_t head = item.first_head; head < item.last_head; ++head) {
      const bool within = head + 1 < item.last_head;
      if (begin == item.first_position()) attended.begin(head, within ? head + 1 : -1, early);
      const HeadGroups now{&groups, head};
      const HeadGroups then{within ? &groups : &later, within ? head + 1 : later.first_head};
      find_step<Kind::kPack>(cache, now, then, begin, unit.begin, unit.end, edge, how, step);
      attend<Kind>(cache, call.factors, attended.of(head), step, products, room);
      if (last) attended.finish(head);
    }
    groups = later;
  }
}

// Projected tokens that units may not begin without: those of chunks, and those whose context is in parts.
template <class Kind>
const typename Kind::Number* do_early(const Call& call, const Plan& plan) {
  using Number = typename Kind::Number;
  if (call.projected == nullptr || plan.early_tokens.empty()) return nullptr;
  thread_local Scratch scratch;
  const int64_t num_heads = call.results.num_heads;
  const int64_t row = query_row<Kind>(call);
  Number* queries = scratch.get<Number>((plan.early_tokens.back() + 1) * num_heads * row);
  const auto count = static_cast<int64_t>(plan.early_tokens.size());
  const auto slot = [&](int64_t i) { return call.slots[plan.early_tokens[i]]; };
  for_each_item(count, [&](int64_t first) {
    thread_local Scratch heads;
    float* room = heads.get<float>(4 * std::max(call.key_dim, call.cache.value_row));
    const int64_t num_tokens = end_of_group(first, count, slot) - first, num_kv_heads = call.cache.num_kv_heads;
    const auto token = [&](int64_t i) { return plan.early_tokens[first + i]; };
    const int64_t num_written = num_tokens * num_kv_heads;
    for (int64_t i = 0, expected = 0; i < num_written;) {
      for (; expected < std::min(num_written, i + 2 + kHeadsAhead); ++expected)
        call.projected->expect_key_and_value(token(expected % num_tokens), expected / num_tokens);
      const int64_t now = i % num_tokens, head = i / num_tokens;
      const bool pair = now + 1 < num_tokens && write_projected(call, token(now), token(now + 1), head, room);
      if (!pair) write_projected(call, token(now), head, room);
      i += pair ? 2 : 1;
    }
    for (int64_t i = 0; i < num_tokens * num_heads; ++i) {
      const int64_t later = i + kHeadsAhead;
      if (later < num_tokens * num_heads) call.projected->expect_query(token(later / num_heads), later % num_heads);
      const int64_t head = i % num_heads;
      call.projected->query(token(i / num_heads), head, room);
      put_query<Kind>(call, room, queries + (token(i / num_heads) * num_heads + head) * row);
    }
  });
  return queries;
}

constexpr int64_t kManyUnits = 8;  // for each thread

template <class Kind>
void attend_all(const Call& call, const Plan& plan) {
  const typename Kind::Number* early = do_early<Kind>(call, plan);
  const int64_t num_heads = call.cache.num_kv_heads, num_units = static_cast<int64_t>(plan.units.size());
  const int64_t num_items = num_units * num_heads, num_stretches = static_cast<int64_t>(plan.stretches.size());
  // A unit's heads lie side by side, so one thread reads them; those of one query read each step of the context together.
  // Of the last units it takes a head at a time, so that all threads end together.
  const int num_threads = at::get_num_threads();
  int64_t num_whole = num_units >= kManyUnits * num_threads ? num_units - num_threads : 0;
  // Read block by block, a head by itself takes longer than what it is worth to end together.
  if (num_whole > 0 && reads_blocks<Kind>(call, {&plan.units[num_units - 1], 0, num_heads})) num_whole = num_units;
  std::atomic<int64_t> next{0}, next_stretch{0};
  on_threads(static_cast<int>(std::min<int64_t>(max_workers(), num_items + num_stretches)), [&](int thread) {
    thread_local Room<Kind> room;
    Products<Kind> products;
    int64_t at = 0, end = 0;
    const auto take = [&] {
      if (at == end) {
        const int64_t taken = next++;
        at = std::min(taken, num_whole) * num_heads + std::max<int64_t>(taken - num_whole, 0);
        end = at + (taken < num_whole ? num_heads : 1);
      }
      if (at >= num_items) return Item{};
      const Unit* unit = &plan.units[at / num_heads];
      const int64_t head = at % num_heads, count = unit->num_queries == 1 ? end - at : 1;
      at += count;
      return Item{unit, head, head + count};
    };
    Item item = take(), following;
    Groups groups;
    if (item.unit != nullptr) groups.find(call.cache, item, item.first_position());
    for (; item.unit != nullptr; item = following) {
      following = take();
      if constexpr (Kind::kPack != 4) {
        if (reads_blocks<Kind>(call, item)) {
          do_blocks<Kind>(call, plan, item, following, early, room);
          if (following.unit != nullptr) groups.find(call.cache, following, following.first_position());
          continue;
        }
      }
      do_item<Kind>(call, plan, item, following, early, groups, products, room);
    }
    if constexpr (Kind::kPack != 4) walk<Kind>(call, plan, thread, next_stretch, early, room);
  });
  for_each_item(static_cast<int64_t>(plan.merged_tokens.size()), [&](int64_t i) {
    thread_local Scratch scratch;
    float* sums = scratch.get<float>(call.results.value_row);
    for (int64_t head = 0; head < call.results.num_heads; ++head)
      call.results.merge(plan.merged_tokens[i], head, plan.merge_start[i], plan.merge_start[i + 1], sums);
  });
}

// What rows of one query, in bf16 or fp32 as the caches are, may be walked in.
bool may_walk(const KvLayout& cache, int64_t group) {
#if defined(PAGED_TILES)
  if (cache.pack == 2) return reads_blocks<Bf16Tiles>(cache, group);
#endif
  return cache.pack == 1 ? reads_blocks<Fp32>(cache, group) : cache.pack == 2 && reads_blocks<Bf16>(cache, group);
}

// The plan in a tensor of plan_attention's. It must be one for what the call is given: it says which tokens there are.
const Plan& planned(const at::Tensor& plan, const KvLayout& cache, int64_t num_tokens, int64_t num_heads) {
  TORCH_CHECK(plan.scalar_type() == at::kByte && plan.numel() == sizeof(Plan), "plan: is none of plan_attention's");
  const Plan& made = *static_cast<const Plan*>(plan.const_data_ptr());
  const PlanSizes& sizes = made.sizes;
  TORCH_CHECK(sizes.num_tokens == num_tokens && sizes.group * cache.num_kv_heads == num_heads &&
                  sizes.num_kv_heads == cache.num_kv_heads && sizes.block_size == cache.block_size &&
                  (made.stretches.empty() || may_walk(cache, sizes.group)),
              "plan: is one for other sizes");
  return made;
}

// Results in `out`, of each token all heads' values; exactly one of `queries` and `projected` is given.
void run(const at::Tensor& out, const Heads* queries, const Projected* projected, const int64_t* slots, int64_t key_dim,
         c10::ScalarType query_type, const KvLayout& cache, const Plan& plan, double scale, double soft_cap,
         const std::optional<at::Tensor>& sinks) {
  thread_local Scratch parts, unused, sink_exponents;
  const int64_t group = plan.sizes.group, num_heads = group * cache.num_kv_heads;
  Results results{static_cast<char*>(out.mutable_data_ptr()), out.scalar_type(), out.stride(0), num_heads,
                  cache.value_dim, cache.value_row, nullptr, nullptr, nullptr};
  results.parts = parts.get<float>(plan.num_slots * num_heads * (cache.value_row + kGroup));
  results.unused = unused.get<bool>(plan.num_slots);
  std::fill(results.unused, results.unused + plan.num_slots, false);
  for (const QueryToken& query : plan.walked)
    std::fill(results.unused + query.slot, results.unused + query.slot + plan.num_walkers, true);
  if (sinks) {
    float* exponents = sink_exponents.get<float>(num_heads);
    const float* given = sinks->const_data_ptr<float>();
    for (int64_t head = 0; head < num_heads; ++head) exponents[head] = given[head] * kLog2E;
    results.sinks = exponents;
  }
  for (const int32_t token : plan.blank_tokens) results.clear(token);
  const Call call{cache, results, ScoreFactors(scale, soft_cap), group, key_dim, queries, projected, slots};
  if (cache.pack == 1) return attend_all<Fp32>(call, plan);
#if defined(PAGED_BF16_DOT)
  if (cache.pack == 4) return attend_all<Int8Dot>(call, plan);
#else
  if (cache.pack == 4) return attend_all<Int8>(call, plan);
#endif
#if defined(PAGED_TILES)
  if (query_type == c10::kBFloat16) return attend_all<Bf16Tiles>(call, plan);
#elif defined(PAGED_BF16_DOT)
  if (query_type == c10::kBFloat16) return attend_all<Bf16Dot>(call, plan);
#endif
  attend_all<Bf16>(call, plan);
}

}  // namespace

at::Tensor plan_attention(const std::optional<at::Tensor>& block_tables, int64_t table_stride,
                          const at::Tensor& query_start, const at::Tensor& context_lens, at::TensorList segments,
                          int64_t num_tokens, int64_t num_heads, const at::Tensor& key_cache,
                          const at::Tensor& value_cache, int64_t window) {
  const KvLayout cache(key_cache, value_cache);
  const int64_t group = num_heads / cache.num_kv_heads;
  Batch batch{{num_tokens, group, cache.num_kv_heads, cache.block_size}, context_lens.size(0), table_stride};
  batch.walks = may_walk(cache, group);
  if (block_tables) batch.tables = block_tables->const_data_ptr<int32_t>();
  batch.query_start = query_start.const_data_ptr<int32_t>();
  batch.context_lens = context_lens.const_data_ptr<int32_t>();
  batch.window = window;
  if (!segments.empty()) {
    batch.num_segments = segments[0].size(0);
    batch.segment_first = segments[0].const_data_ptr<int32_t>();
    batch.segment_end = segments[1].const_data_ptr<int32_t>();
    batch.segment_row_start = segments[2].const_data_ptr<int32_t>();
    batch.segment_rows = segments[3].const_data_ptr<int32_t>();
    batch.own_start = segments[4].const_data_ptr<int32_t>();
  }
  auto plan = std::make_unique<Plan>();
  plan->make(batch, at::get_num_threads());
  const auto forget = [block_tables](void* made) { delete static_cast<Plan*>(made); };
  return at::from_blob(plan.release(), {sizeof(Plan)}, forget, at::TensorOptions().dtype(at::kByte));
}

at::Tensor paged_attention(const at::Tensor& q, const at::Tensor& key_cache, const at::Tensor& value_cache,
                           const at::Tensor& plan, double scale, double soft_cap,
                           const std::optional<at::Tensor>& sinks) {
  const KvLayout cache(key_cache, value_cache);
  const at::Tensor out = at::empty({q.size(0), q.size(1), cache.value_dim}, q.options());
  const Heads queries(q);
  run(out, &queries, nullptr, nullptr, q.size(2), q.scalar_type(), cache, planned(plan, cache, q.size(0), q.size(1)),
      scale, soft_cap, sinks);
  return out;
}

at::Tensor attend_projected(const at::Tensor& qkv, const std::optional<at::Tensor>& query_norm,
                            const std::optional<at::Tensor>& key_norm, double epsilon,
                            const std::optional<at::Tensor>& cos, const std::optional<at::Tensor>& sin, bool interleaved,
                            const at::Tensor& slots, const at::Tensor& key_cache, const at::Tensor& value_cache,
                            const at::Tensor& plan, double scale, double soft_cap,
                            const std::optional<at::Tensor>& sinks) {
  const KvLayout cache(key_cache, value_cache);
  const int64_t num_tokens = qkv.size(0), num_heads = qkv.size(1) - 2 * cache.num_kv_heads;
  const auto data = [](const std::optional<at::Tensor>& tensor) {
    return tensor ? tensor->const_data_ptr<float>() : nullptr;
  };
  const Projected projected{Heads(qkv),
                            num_heads,
                            cache.num_kv_heads,
                            data(query_norm),
                            data(key_norm),
                            static_cast<float>(epsilon),
                            {data(cos), data(sin), cos ? cos->size(1) : 0, interleaved}};
  const at::Tensor out = empty_rows({num_tokens, num_heads * cache.value_dim}, qkv.options());
  run(out, nullptr, &projected, slots.const_data_ptr<int64_t>(), qkv.size(2), qkv.scalar_type(), cache,
      planned(plan, cache, num_tokens, num_heads), scale, soft_cap, sinks);
  return out;
}

}  // namespace paged
