#pragma once

// Intel AMX: eight tile registers of up to 16 rows of 64 bytes, and products of tiles.
//
// Compiled with PAGED_EMULATE_TILES the same functions work on ordinary memory, with the rules of the instructions, so
// that kernels over them can be tested on a CPU without AMX.
//
// Only a thread between `Tiles` and its end may use tiles, and no other code in between may use them.

#include <cstdint>
#include <cstring>

#if defined(PAGED_EMULATE_TILES)
#include <stdexcept>
#else
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace paged {

// Rows of each tile (0: unused). All have 64 bytes a row.
struct TileRows {
  uint8_t rows[8];

  bool operator==(const TileRows& other) const { return std::memcmp(rows, other.rows, sizeof(rows)) == 0; }
};

namespace tiles {

#if defined(PAGED_EMULATE_TILES)

struct Registers {
  bool configured = false;
  uint8_t rows[8] = {};
  uint8_t bytes[8][16][64] = {};

  void check(int tile) const {
    if (!configured || rows[tile] == 0) throw std::logic_error("tile is not configured");
  }
};

inline Registers& registers() {
  static thread_local Registers all;
  return all;
}

inline bool available() { return true; }

inline void configure(const TileRows& shape) {
  Registers& all = registers();
  all = Registers{};
  all.configured = true;
  std::memcpy(all.rows, shape.rows, sizeof(all.rows));
}

inline void release() { registers().configured = false; }

template <int T>
void zero() {
  registers().check(T);
  std::memset(registers().bytes[T], 0, sizeof(registers().bytes[T]));
}

template <int T>
void load(const void* from, int64_t stride) {
  Registers& all = registers();
  all.check(T);
  std::memset(all.bytes[T], 0, sizeof(all.bytes[T]));
  for (int r = 0; r < all.rows[T]; ++r) std::memcpy(all.bytes[T][r], static_cast<const char*>(from) + r * stride, 64);
}

template <int T>
void store(void* to, int64_t stride) {
  Registers& all = registers();
  all.check(T);
  for (int r = 0; r < all.rows[T]; ++r) std::memcpy(static_cast<char*>(to) + r * stride, all.bytes[T][r], 64);
}

// C [m][16] += A [m][16 steps] · B [16 steps][16], with `step` for the product of one step.
template <int C, int A, int B, class Sum, class Step>
void dot(Step step) {
  Registers& all = registers();
  all.check(C), all.check(A), all.check(B);
  if (all.rows[C] != all.rows[A] || all.rows[B] != 16) throw std::logic_error("tiles do not fit each other");
  for (int m = 0; m < all.rows[C]; ++m) {
    for (int n = 0; n < 16; ++n) {
      Sum sum;
      std::memcpy(&sum, all.bytes[C][m] + 4 * n, 4);
      for (int k = 0; k < 16; ++k) sum = step(sum, all.bytes[A][m] + 4 * k, all.bytes[B][k] + 4 * n);
      std::memcpy(all.bytes[C][m] + 4 * n, &sum, 4);
    }
  }
}

inline float widened(const uint8_t* bf16) {
  uint32_t bits = (uint32_t{bf16[0]} << 16) | (uint32_t{bf16[1]} << 24);
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

template <int C, int A, int B>
void dot_bf16() {
  dot<C, A, B, float>([](float sum, const uint8_t* a, const uint8_t* b) {
    return sum + widened(a) * widened(b) + widened(a + 2) * widened(b + 2);
  });
}

// A is unsigned, B is signed.
template <int C, int A, int B>
void dot_int8() {
  dot<C, A, B, int32_t>([](int32_t sum, const uint8_t* a, const uint8_t* b) {
    for (int i = 0; i < 4; ++i) sum += int32_t{a[i]} * static_cast<int8_t>(b[i]);
    return sum;
  });
}

#else

// Whether this process may use tiles: Linux gives the memory for them only when it is asked.
inline bool available() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
}

inline void configure(const TileRows& shape) {
  struct alignas(64) {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  } config = {};
  config.palette = 1;
  for (int t = 0; t < 8; ++t) {
    config.rows[t] = shape.rows[t];
    config.row_bytes[t] = shape.rows[t] ? 64 : 0;
  }
  asm volatile("ldtilecfg %0" ::"m"(config));
}

inline void release() { asm volatile("tilerelease"); }

template <int T>
inline void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}

template <int T>
inline void load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}

template <int T>
inline void store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}

template <int C, int A, int B>
inline void dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

// A is unsigned, B is signed.
template <int C, int A, int B>
inline void dot_int8() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

#endif

}  // namespace tiles

// A thread's use of tiles. Giving them back at its end keeps the state that the kernel saves for the thread small.
class Tiles {
 public:
  Tiles() = default;
  ~Tiles() {
    if (configured_) tiles::release();
  }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;

  // Shapes the tiles and sets them to zero, unless they have this shape already.
  void shape(const TileRows& rows) {
    if (configured_ && rows == rows_) return;
    tiles::configure(rows);
    rows_ = rows;
    configured_ = true;
  }

 private:
  TileRows rows_ = {};
  bool configured_ = false;
};

}  // namespace paged
