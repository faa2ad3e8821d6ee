#pragma once

// Sixteen numbers at a time, read and written as bf16 and computed with in fp32: what products do with their sums.
// `Floats` are those numbers, and add and multiply by operators; `Lanes` says which of them are meant, always the first
// few: what is not is neither read nor written.
#if defined(PAGED_BF16_DOT)
#include "lanes_dot.h"
#else
#include "lanes_widening.h"
#endif
