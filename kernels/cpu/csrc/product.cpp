#include "product.h"

#include <algorithm>
#include <atomic>

#include "panels.h"
#include "parallel.h"
#include "piece.h"
#include "widened_strip.h"

#if defined(PAGED_BF16_DOT)
#include "dot_kernel.h"
#else
#include "widening_kernel.h"
#endif

#if defined(PAGED_TILES)
#include "tile_kernel.h"
#endif

namespace paged {
namespace {

constexpr int64_t kMaxChunk = 256;          // rows whose sums lie in a worker's scratch at once
constexpr int64_t kMinChunk = 64;
constexpr int64_t kChunkBytes = 512 << 10;  // of rows: they stay in a core's second cache while panels pass by
constexpr int64_t kGroupedRows = 64;        // so many (rows · panels) make it worth to ask for more work
constexpr int64_t kMaxGroup = 8;

// Multiplies blocks of rows with pieces of panels; one for each worker.
template <Arithmetic A>
class Multiplier {
 public:
  // Few rows are bound by memory, and dot products by vectors need no shaping of tiles.
  explicit Multiplier(int64_t num_rows)
      : tiled_(tiles_pay(num_rows)), in_strips_(strips_pay(A, num_blocks(num_rows))), num_rows_(num_rows) {}

  int64_t num_blocks(int64_t num_rows) const { return divide_up(num_rows, tiled_ ? kTiledBlock : kVectorRows); }

  // Rows of the i-th block. Vectors are best used by blocks of equal size, tiles by full ones.
  int64_t block(int64_t num_rows, int64_t i) const {
    if (tiled_) return std::min(kTiledBlock, num_rows - i * kTiledBlock);
    const int64_t blocks = num_blocks(num_rows);
    return num_rows / blocks + (i < num_rows % blocks);
  }

  // Steps that are worth to be multiplied with all rows before the next ones are: they stay in the first cache where
  // tiles need a line a cycle.
  int64_t piece_steps() const {
    if (in_strips_) return WidenedStrip<A>::kMostSteps;
    return tiled_ ? 256 : vector_piece_steps(num_rows_);
  }

  // Parts of a piece's outputs, each of which is begun by `take_strip` and then multiplied with all rows.
  int num_strips() const { return in_strips_ ? kStrips : 1; }

  void take_strip(const Piece& piece, int strip) {
    if (in_strips_) strip_.widen(piece, strip);
  }

  void multiply(const Piece& piece, int64_t num_rows) {
#if defined(PAGED_TILES)
    if (tiled_) return tile_product<A>(tiles_, piece, num_rows);
#endif
    if (in_strips_) return strip_.multiply(piece, num_rows);
    vector_product<A>(piece, num_rows);
  }

 private:
#if defined(PAGED_TILES)
  static constexpr int64_t kTiledBlock = kTileRows;
  static bool tiles_pay(int64_t num_rows) { return num_rows > 8 && tiles::available(); }
  Tiles tiles_;
#else
  static constexpr int64_t kTiledBlock = kVectorRows;
  static bool tiles_pay(int64_t) { return false; }
#endif
  const bool tiled_, in_strips_;
  const int64_t num_rows_;  // at most, of a chunk
  WidenedStrip<A> strip_;
};

// The work: (chunk of rows, group of panels), chunk by chunk, so that all workers share a chunk's rows.
struct Jobs {
  int64_t chunk, num_chunks;  // rows
  int64_t group, num_groups;  // panels

  Jobs(const Rows& rows, int64_t step_bytes, const Panels& panels, int64_t workers, int64_t panels_together) {
    const int64_t row_bytes = panels.steps * step_bytes;
    const int64_t most = std::clamp(kChunkBytes / row_bytes, kMinChunk, kMaxChunk);
    num_chunks = divide_up(rows.count, most);
    // Few panels for many workers: more chunks instead.
    const int64_t wanted = divide_up(2 * workers, panels.count);
    if (workers > 1) num_chunks = std::max(num_chunks, std::min(wanted, divide_up(rows.count, 2 * kVectorRows)));
    chunk = divide_up(rows.count, num_chunks);
    num_chunks = divide_up(rows.count, chunk);
    group = std::clamp(kGroupedRows / chunk, int64_t{1}, kMaxGroup);
    group = std::clamp(panels.count / (8 * workers), int64_t{1}, group);
    group = divide_up(group, panels_together) * panels_together;
    num_groups = divide_up(panels.count, group);
  }

  int64_t count() const { return num_chunks * num_groups; }
};

template <Arithmetic A>
class Worker {
 public:
  Worker(const Rows& rows, const Panels& panels, const Jobs& jobs, const Epilogue& epilogue, int id)
      : rows_(rows), panels_(panels), jobs_(jobs), epilogue_(epilogue), id_(id), multiplier_(jobs.chunk) {
    const int64_t pieces = divide_up(panels.steps, multiplier_.piece_steps());
    piece_steps_ = divide_up(divide_up(panels.steps, pieces), kStepsRound) * kStepsRound;
  }

  // Work is asked for one job ahead, to know what to prefetch; but not near the end, where others may be idle: there
  // what the others leave if they take one each is likely.
  void run(std::atomic<int64_t>& next, int64_t num_workers) {
    const int64_t count = jobs_.count();
    int64_t job = next.fetch_add(1);
    while (job < count) {
      const bool ahead = job + 2 * num_workers < count;
      const int64_t following = ahead ? next.fetch_add(1) : next.load() + num_workers - 1;
      run_job(job, following < count ? panel(first_panel(following)) : nullptr);
      job = ahead ? following : next.fetch_add(1);
    }
  }

 private:
  int64_t first_panel(int64_t job) const { return job % jobs_.num_groups * jobs_.group; }
  const char* panel(int64_t p) const { return panels_.data + p * panels_.steps * kStepRow; }

  void run_job(int64_t job, const char* after) {
    const int64_t first_row = job / jobs_.num_groups * jobs_.chunk;
    const int64_t num_rows = std::min(jobs_.chunk, rows_.count - first_row);
    const int64_t begin = first_panel(job), end = std::min(begin + jobs_.group, panels_.count);
    for (int64_t p = begin; p < end; ++p) {
      run_panel(p, first_row, num_rows, p + 1 < end ? panel(p + 1) : after);
    }
  }

  void run_panel(int64_t p, int64_t first_row, int64_t num_rows, const char* after) {
    const int64_t blocks = multiplier_.num_blocks(num_rows);
    const int strips = multiplier_.num_strips();
    for (int64_t step = 0; step < panels_.steps; step += piece_steps_) {
      const int64_t steps = std::min(piece_steps_, panels_.steps - step);
      const int64_t left = panels_.steps - step - steps;
      const char *begin = panel(p) + step * kStepRow, *next = left ? begin + steps * kStepRow : after;
      const int64_t next_lines = std::min(piece_steps_, left ? left : panels_.steps) * kStepRow / 64;
      Piece piece{nullptr, rows_.stride, begin, steps, nullptr, step > 0, next, 0};
      int64_t fetched = next ? 0 : next_lines;
      for (int strip = 0; strip < strips; ++strip) {
        multiplier_.take_strip(piece, strip);
        int64_t row = 0;
        for (int64_t i = 0; i < blocks; ++i) {
          const Tile tile{sums_ + row * kPanel, first_row + row, multiplier_.block(num_rows, i), p, id_};
          piece.rows = rows_.data + tile.first_row * rows_.stride + step * row_step_bytes(A);
          piece.sums = tile.sums;
          piece.lines = divide_up(next_lines - fetched, ((strips - strip) * blocks - i) * steps / 4);
          const bool is_last = !left && strip + 1 == strips;
          if (is_last) epilogue_.expect(tile);
          multiplier_.multiply(piece, tile.num_rows);
          if (is_last) epilogue_.take(tile);
          row += tile.num_rows;
          const int64_t now_fetched = std::min(piece.lines * (steps / 4), next_lines - fetched);
          fetched += now_fetched;
          piece.prefetch += now_fetched * 64;
        }
      }
    }
  }

  const Rows& rows_;
  const Panels& panels_;
  const Jobs& jobs_;
  const Epilogue& epilogue_;
  const int id_;
  Multiplier<A> multiplier_;
  int64_t piece_steps_;
  alignas(64) float sums_[kMaxChunk * kPanel];
};

template <Arithmetic A>
void run(const Rows& rows, const Panels& panels, const Epilogue& epilogue) {
  const int64_t workers = max_workers();
  const Jobs jobs(rows, row_step_bytes(A), panels, workers, epilogue.panels_together());
  std::atomic<int64_t> next{0};
  on_threads(static_cast<int>(std::min(workers, jobs.count())), [&](int id) {
    Worker<A>(rows, panels, jobs, epilogue, id).run(next, workers);
  });
}

}  // namespace

void product(Arithmetic arithmetic, const Rows& rows, const Panels& panels, const Epilogue& epilogue) {
  if (rows.count == 0) return;
  if (arithmetic == Arithmetic::bf16) {
    run<Arithmetic::bf16>(rows, panels, epilogue);
  } else {
    run<Arithmetic::int8>(rows, panels, epilogue);
  }
}

}  // namespace paged
