// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Weights in E2M1, E4M3 or integers, with scales in E8M0, BF16 or E4M3, and BF16 (its own way: dense.cuh), against
// BF16 rows, on tensor cores.
//
// A weight keeps its bits of exponent and mantissa where BF16 has its lowest exponent bits (integers: mantissa),
// so it stands for its value times 2^-126 (E2M1), 2^-120 (E4M3) or 2^-133 (integers), exactly, and costs a shift
// and a mask. Rows go up by 2^48 and scales by 2^64 (E4M3: other powers); `kBack` takes the rest off the sum. So rows
// must be below 2^79 and scales at most 2^63 (E8M0 190), which the Python side checks at load. A weight in E4M3 that is
// NaN counts as 480.
#pragma once
#include <cuda_bf16.h>

using bf16 = __nv_bfloat16;

constexpr float kBack = 16384.f;  // of E2M1: 126 - 48 - 64 = 14

__device__ __forceinline__ unsigned product(unsigned two_bf16, unsigned two_others) {
  unsigned result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(two_bf16), "r"(two_others), "r"(0x80008000u));
  return result;
}

__device__ __forceinline__ unsigned up(unsigned two_bf16) { return product(two_bf16, 0x57805780u); }  // times 2^48
constexpr float kDown = 1.f / 281474976710656;  // and back

__device__ __forceinline__ uint4 up(uint4 v) {
  return make_uint4(up(v.x), up(v.y), up(v.z), up(v.w));
}

__device__ __forceinline__ float scale(unsigned e8m0) {
  return __uint_as_float((e8m0 + 64) << 23);
}

// d[16 weights x 8 rows] += a[16 weights x 16 k] * b[16 k x 8 rows]. A lane (g = lane / 4,
// q = lane % 4) holds weights g and g + 8 in a, row g in b, rows 2q and 2q + 1 in d.
__device__ __forceinline__ void mma(float (&d)[4], unsigned a0, unsigned a1, unsigned a2,
                                    unsigned a3, unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
      " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// acc += d, each of the two weights times its scale.
__device__ __forceinline__ void add_scaled(float (&acc)[4], const float (&d)[4], float low,
                                           float high) {
  acc[0] = fmaf(d[0], low, acc[0]);
  acc[1] = fmaf(d[1], low, acc[1]);
  acc[2] = fmaf(d[2], high, acc[2]);
  acc[3] = fmaf(d[3], high, acc[3]);
}

// Let the next kernel of the stream begin, then wait for the one before this. Every kernel does both,
// so what it writes after the wait is never read or overwritten out of turn. What follows must wait, too, if
// it is launched so that it may begin early: a kernel that does not reads what is not written yet (module.py
// refuses vLLM's of LoRA, VLLM_LORA_ENABLE_DUAL_STREAM).
__device__ __forceinline__ void begin_next() {
  asm volatile("griddepcontrol.launch_dependents;");
}
__device__ __forceinline__ void wait_for_turn() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void take_turn() {
  begin_next();
  wait_for_turn();
}
