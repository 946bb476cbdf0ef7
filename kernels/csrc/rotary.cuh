// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// Rotary embedding of queries and keys, and keys and values put into the paged cache: what lies between
// qkv's product and the attention, for any number of rows.
#pragma once
#include <cuda_fp8.h>

#include "layer.cuh"

namespace rotary {

constexpr int kThreads = 128;
constexpr int kHead = 64, kHalf = kHead / 2;  // column i of a head turns with column i + kHalf
constexpr int kShare = kHalf / 8;             // threads of a head, each with eight columns of both halves

struct Operands {
  const bf16* qkv;             // [rows][(heads + 2 * kv_heads) * kHead]: queries, keys, values
  const float* cos_sin;        // [positions][kHead]: kHalf cosines, then kHalf sines
  const long long* positions;  // [rows]
  const long long* slots;      // [written], places in the cache; negative: the row only pads
  bf16* queries;               // [rows][heads * kHead]
  void* cache;                 // [blocks][kv_heads][block_size][2 * kHead]: a key, then its value
  const float *k_scale, *v_scale;  // of an FP8 cache: what its keys and values are divided by
  long long block_stride, head_stride, slot_stride;  // of the cache, in elements: the last is contiguous
  int heads, kv_heads, block_size;
  int written;  // rows that are put into the cache, from the first on
};

// Where the key of a slot begins; its value is kHead further.
__host__ __device__ inline long long place(const Operands& o, long long slot, int head) {
  const unsigned at = (unsigned)slot, size = (unsigned)o.block_size;  // 32 bits: a division of 64 is slow
  return at / size * o.block_stride + head * o.head_stride + at % size * o.slot_stride;
}

// Eight BF16 as E4M3, to the byte what vLLM's reshape_and_cache_flash writes: divided, rounded to nearest
// even, what is beyond 448 becomes 448 and NaN 0x7f.
__host__ __device__ inline void put_e4m3(unsigned char* to, uint4 eight, float scale) {
  const __nv_bfloat162* from = reinterpret_cast<const __nv_bfloat162*>(&eight);
  unsigned pairs[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    float2 both = __bfloat1622float2(from[i]);
    if (scale != 1) both.x /= scale, both.y /= scale;
    pairs[i] = __nv_cvt_float2_to_fp8x2(both, __NV_SATFINITE, __NV_E4M3);
  }
  *reinterpret_cast<uint2*>(to) = make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// A block for a row's next kThreads threads: kShare for each head of its queries, keys and values.
// CACHE: bf16, or unsigned char for E4M3.
template <class CACHE> __device__ __forceinline__ void rotate_and_cache(const Operands& o) {
  const int row = blockIdx.x, thread = blockIdx.y * kThreads + threadIdx.x;
  const int head = thread / kShare, column = thread % kShare * 8;
  const int values = o.heads + o.kv_heads, all = values + o.kv_heads;
  // Positions and slots are read before the wait: what writes them has ended. vLLM's runners do so before
  // the step, in launches that trigger nothing early, and the step's first one (the embedding, or a norm)
  // is no dependent launch, so it starts after those have ended, and ours after it.
  const long long slot = row < o.written ? o.slots[row] : -1;
  const float* from = o.cos_sin + o.positions[row] * kHead + column;
  layer::Eight cosine = {}, sine = {};
  cosine.add(from);
  sine.add(from + kHalf);
  const bool key = head >= o.heads, value = head >= values;
  float scale = 1;
  if (sizeof(CACHE) == 1 && key) scale = *(value ? o.v_scale : o.k_scale);
  void* to = o.queries + ((size_t)row * o.heads + head) * kHead + column;
  if (key)
    to = static_cast<CACHE*>(o.cache) + place(o, slot, (head - o.heads) % o.kv_heads) + (value ? kHead : 0) + column;
  take_turn();
  if (head >= all || (key && slot < 0)) return;
  const bf16* at = o.qkv + ((size_t)row * all + head) * kHead + column;
  uint4 low, high;
  if (!value) {
    layer::Eight a = {}, b = {}, first, second;
    a.add(at);
    b.add(at + kHalf);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      first.value[i] = a.value[i] * cosine.value[i] - b.value[i] * sine.value[i];
      second.value[i] = b.value[i] * cosine.value[i] + a.value[i] * sine.value[i];
    }
    low = first.rounded();
    high = second.rounded();
  } else {
    low = *reinterpret_cast<const uint4*>(at);
    high = *reinterpret_cast<const uint4*>(at + kHalf);
  }
  if (sizeof(CACHE) == 1 && key) {
    put_e4m3(static_cast<unsigned char*>(to), low, scale);
    put_e4m3(static_cast<unsigned char*>(to) + kHalf, high, scale);
  } else {
    *static_cast<uint4*>(to) = low;
    *reinterpret_cast<uint4*>(static_cast<bf16*>(to) + kHalf) = high;
  }
}

}  // namespace rotary
