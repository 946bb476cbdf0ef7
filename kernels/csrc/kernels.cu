// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Kernels for a decode step of one to 16 rows (add_norm and rotate_and_cache: any number), under the names
// that kernels/vllm_sparkforge/decode loads. Each takes one struct.
#include "dense.cuh"
#include "layer.cuh"
#include "rotary.cuh"
#include "row_major.cuh"

// The fewest blocks a multiprocessor: an H200's 132 take qkv's 320 blocks at once only if it is three.
// What hides a GB10's latency needs fewer, and more registers.
#if __CUDA_ARCH__ >= 1200
#define BLOCKS_OF(BLOCKS) (BLOCKS < 2 ? BLOCKS : 2)
#else
#define BLOCKS_OF(BLOCKS) BLOCKS
#endif

// SHORT, LONG, WIDE: the tiles that a warp has in flight in narrow_12, narrow_16 and wide.
// narrow_16 with 16 rows: one block fits a multiprocessor anyway, so ptxas need not spill to fit two.
#define DENSE(NAME, FORMAT, SHORT, LONG, WIDE, ROWS, BLOCKS)                                                \
  extern "C" __global__ void __launch_bounds__(384, BLOCKS_OF(BLOCKS))                                      \
      dense_##NAME##_narrow_12_##ROWS(dense::Operands o) {                                                  \
    dense::narrow<dense::FORMAT, 12, SHORT, ROWS>(o);                                                       \
  }                                                                                                         \
  extern "C" __global__ void __launch_bounds__(512, ROWS == 16)                                             \
      dense_##NAME##_narrow_16_##ROWS(dense::Operands o) {                                                  \
    dense::narrow<dense::FORMAT, 16, LONG, ROWS>(o);                                                        \
  }                                                                                                         \
  extern "C" __global__ void __launch_bounds__(640) dense_##NAME##_wide_##ROWS(dense::Operands o) {         \
    dense::wide<dense::FORMAT, 20, WIDE, ROWS>(o);                                                          \
  }

DENSE(mxfp4, Mxfp4, 4, 4, 5, 8, 3)
DENSE(mxfp4, Mxfp4, 4, 4, 3, 16, 2)
DENSE(nvfp4, Nvfp4, 3, 4, 4, 8, 3)
DENSE(nvfp4, Nvfp4, 3, 4, 2, 16, 2)
DENSE(int6, Int6, 2, 3, 3, 8, 3)
DENSE(int6, Int6, 3, 3, 2, 16, 2)
DENSE(mxfp8, Mxfp8, 2, 2, 3, 8, 3)
DENSE(mxfp8, Mxfp8, 2, 2, 2, 16, 1)
DENSE(int8, Int8, 2, 2, 3, 8, 3)
DENSE(int8, Int8, 2, 2, 2, 16, 1)
DENSE(lossless, Lossless, 1, 2, 2, 8, 3)
DENSE(lossless, Lossless, 2, 2, 2, 16, 1)
DENSE(bf16, Bf16, 2, 2, 2, 8, 2)
DENSE(bf16, Bf16, 2, 2, 2, 16, 1)

#define EXPAND(NAME, FORMAT)                                                                       \
  extern "C" __global__ void __launch_bounds__(256) expand_##NAME(dense::Expanded o) {            \
    dense::expand<dense::FORMAT>(o);                                                               \
  }

EXPAND(mxfp4, Mxfp4)
EXPAND(nvfp4, Nvfp4)
EXPAND(int6, Int6)
EXPAND(mxfp8, Mxfp8)
EXPAND(int8, Int8)
EXPAND(lossless, Lossless)

#define EXPERTS(ROWS, TILES, BLOCKS)                                                                        \
  extern "C" __global__ void __launch_bounds__(256, BLOCKS_OF(BLOCKS)) experts_gate_up_##ROWS(experts::Operands o) {  \
    experts::product<8, 2, TILES, ROWS, true>(o);                                                           \
  }                                                                                                         \
  extern "C" __global__ void __launch_bounds__(256, BLOCKS_OF(BLOCKS)) experts_down_##ROWS(experts::Operands o) {     \
    experts::product<8, 2, 1, ROWS, false>(o);                                                              \
  }

EXPERTS(1, 1, 2)
EXPERTS(2, 1, 3)
EXPERTS(8, 2, 3)
EXPERTS(16, 2, 3)

// 2 to 8 rows, and up to 16: a block has one or two of them.
#define ROW_MAJOR(NAME, TILES, ROWS)                                                                        \
  extern "C" __global__ void __launch_bounds__(256, BLOCKS_OF(3))                                           \
      experts_rows_gate_up_##NAME(experts::Operands o) {                                                    \
    row_major::product<8, 2, 2 * TILES, ROWS, true>(o);                                                     \
  }                                                                                                         \
  extern "C" __global__ void __launch_bounds__(256, BLOCKS_OF(3))                                           \
      experts_rows_down_##NAME(experts::Operands o) {                                                       \
    row_major::product<8, 2, TILES, ROWS, false>(o);                                                        \
  }

ROW_MAJOR(1, 1, 1)
ROW_MAJOR(8, 2, 8)
ROW_MAJOR(16, 2, 16)

// On a GB10 it fits a multiprocessor beside a block of the o projection, the kernel before it (but for BF16).
extern "C" __global__ void __launch_bounds__(layer::kThreads, __CUDA_ARCH__ < 1200 ? 1 : 2) route(layer::Routed o) {
  layer::route(o);
}
extern "C" __global__ void __launch_bounds__(layer::kThreads) experts_combine(layer::Combined o) {
  layer::combine(o);
}
extern "C" __global__ void __launch_bounds__(layer::kThreads) add_norm(layer::Normed o) {
  layer::add_and_normalize(o);
}

extern "C" __global__ void __launch_bounds__(rotary::kThreads) rotate_and_cache(rotary::Operands o) {
  rotary::rotate_and_cache<bf16>(o);
}
extern "C" __global__ void __launch_bounds__(rotary::kThreads) rotate_and_cache_fp8(rotary::Operands o) {
  rotary::rotate_and_cache<unsigned char>(o);
}
