// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What lies between the products of a gpt-oss layer: residual and RMSNorm for any number of rows, with
// the router and its top four, or the sum of a row's experts, for one to eight.
#pragma once
#include "dense.cuh"
#include "experts.cuh"

namespace layer {

constexpr int kThreads = 512;
constexpr int kMostHidden = 3072, kMostExperts = 128;

// Eight values of a row a thread.
struct Eight {
  float value[8];

  __device__ __forceinline__ void add(const bf16* from) {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    const unsigned words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      value[2 * i] += __uint_as_float(words[i] << 16);
      value[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000u);
    }
  }
  __device__ __forceinline__ void add(const float* from) {
    const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
    value[0] += a.x, value[1] += a.y, value[2] += a.z, value[3] += a.w;
    value[4] += b.x, value[5] += b.y, value[6] += b.z, value[7] += b.w;
  }
  __device__ __forceinline__ uint4 rounded() const {
    unsigned words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const __nv_bfloat162 both = __floats2bfloat162_rn(value[2 * i], value[2 * i + 1]);
      words[i] = *reinterpret_cast<const unsigned*>(&both);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
  __device__ __forceinline__ float squares() const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) sum = fmaf(value[i], value[i], sum);
    return sum;
  }
  __device__ __forceinline__ void normalize(float factor, const Eight& weight) {
#pragma unroll
    for (int i = 0; i < 8; i++) value[i] *= factor * weight.value[i];
  }
};

__device__ __forceinline__ float sum_of_warp(float v) {
#pragma unroll
  for (int i = 16; i; i /= 2) v += __shfl_xor_sync(~0u, v, i);
  return v;
}

struct Routed {
  const bf16* x;         // [rows][k], what the attention gives
  const bf16* residual;  // [rows][k]
  const bf16* norm;      // [k], RMSNorm's weight
  const bf16* weights;   // [n][k], the router's
  const bf16* bias;      // [n]
  const bool* padding;   // [rows], whether a row only pads; or null
  bf16* sum;             // [rows][k]: x + residual
  bf16* normed;          // [rows][k]: the sum, normalized
  int* ids;              // [rows * kTop], the largest first; -1 in rows that pad
  float* shares;         // [rows * kTop], softmax of these
  int k, n, rows;
  float epsilon;
};

// sum, RMSNorm, router, top four and their softmax. A cluster of n / 16 blocks: each normalizes all rows
// for itself and has 16 of the experts; the first of them chooses. Like the product of BF16 that it
// replaces, a logit is rounded to BF16 before the choice. Of equal ones the first counts as larger.
// Shared memory: ROWS * (k + 32) * 2 bytes.
template <int ROWS> __device__ __forceinline__ void route(const Routed& o) {
  using Tile = dense::Tile<dense::Bf16>;
  extern __shared__ __align__(16) bf16 shared[];
  constexpr int kWarps = kThreads / 32, kShare = kThreads / ROWS, kTiles = kMostHidden / 64 / kWarps;
  constexpr int kRuns = (kMostHidden / 8 + kShare - 1) / kShare;
  __shared__ float squares[kWarps], sums[kWarps][128], logits[8][16];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int tiles = o.k / 64, pitch = o.k + 32;
  const dense::Operands operands{nullptr, reinterpret_cast<const uint4*>(o.weights), nullptr, nullptr, nullptr, nullptr, o.n, tiles, 0};
  const dense::Lane<dense::Bf16> from(operands, blockIdx.x, lane);
  Tile v[kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; i++)
    if (warp + i * kWarps < tiles) from.load(v[i], warp + i * kWarps);
  // a row has kShare threads, a thread some runs of eight columns
  const int row = threadIdx.x / kShare, first = threadIdx.x % kShare * 8;
#pragma unroll
  for (int i = 0; i < kRuns; i++)
    if (first + i * kShare * 8 < o.k)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(o.norm + first + i * kShare * 8));
  const float bias = __bfloat162float(o.bias[blockIdx.x * 16 + threadIdx.x % 16]);
  take_turn();

  Eight part[kRuns] = {};
  float square = 0;
  if (row < o.rows) {
#pragma unroll
    for (int i = 0; i < kRuns; i++) {
      const int column = first + i * kShare * 8;
      if (column >= o.k) continue;
      part[i].add(o.x + (size_t)row * o.k + column);
      part[i].add(o.residual + (size_t)row * o.k + column);
      square += part[i].squares();
    }
  }
  square = sum_of_warp(square);
  if (lane == 0) squares[warp] = square;
  __syncthreads();
  if (row < o.rows) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kWarps / ROWS; i++) sum += squares[row * (kWarps / ROWS) + i];
    const float factor = rsqrtf(sum / o.k + o.epsilon);
#pragma unroll
    for (int i = 0; i < kRuns; i++) {
      const int column = first + i * kShare * 8;
      if (column >= o.k) continue;
      const bool writes = column / 8 % gridDim.x == blockIdx.x;
      const size_t at = (size_t)row * o.k + column;
      if (writes) *reinterpret_cast<uint4*>(o.sum + at) = part[i].rounded();
      Eight weight = {};
      weight.add(o.norm + column);
      part[i].normalize(factor, weight);
      const uint4 rounded = part[i].rounded();
      if (writes) *reinterpret_cast<uint4*>(o.normed + at) = rounded;
      *reinterpret_cast<uint4*>(shared + row * pitch + column) = rounded;
    }
  }
  __syncthreads();

  float acc[1][4] = {};
#pragma unroll
  for (int i = 0; i < kTiles; i++) {
    const int tile = warp + i * kWarps;
    if (tile >= tiles) break;
    uint4 x[1][2];
#pragma unroll
    for (int h = 0; h < 2; h++)
      x[0][h] = *reinterpret_cast<const uint4*>(shared + min(g, ROWS - 1) * pitch + tile * 64 + 32 * h + 8 * q);
    v[i].multiply(x, acc);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) sums[warp][(2 * q + i % 2) * 16 + g + i / 2 * 8] = acc[0][i];
  __syncthreads();
  if (threadIdx.x < o.rows * 16) {
    const int at = threadIdx.x;
    float sum = bias;
#pragma unroll
    for (int i = 0; i < kWarps; i++) sum += sums[i][at];
    logits[at / 16][at % 16] = __bfloat162float(__float2bfloat16(sum));
  }
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
  if (blockIdx.x == 0 && warp < o.rows) {
    unsigned long long best[kMostExperts / 32];  // a logit in an order of integers, and the expert
#pragma unroll
    for (int i = 0; i < kMostExperts / 32; i++) {
      const unsigned expert = lane + 32 * i;
      best[i] = 0;
      if (expert >= o.n) continue;
      unsigned address = (unsigned)__cvta_generic_to_shared(&logits[warp][expert % 16]);
      unsigned bits;
      asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(address) : "r"(expert / 16));
      asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(bits) : "r"(address) : "memory");
      bits = bits >> 31 ? ~bits : bits | 0x80000000u;
      best[i] = (unsigned long long)bits << 32 | ~expert;
    }
    const bool pads = o.padding && o.padding[warp];
    float largest = 0, total = 0, share = 0;
#pragma unroll
    for (int i = 0; i < experts::kTop; i++) {
      unsigned long long top = 0;
#pragma unroll
      for (int j = 0; j < kMostExperts / 32; j++) top = max(top, best[j]);
#pragma unroll
      for (int j = 16; j; j /= 2) top = max(top, __shfl_xor_sync(~0u, top, j));
#pragma unroll
      for (int j = 0; j < kMostExperts / 32; j++)
        if (best[j] == top) best[j] = 0;
      const unsigned ordered = top >> 32;
      const float logit = __uint_as_float(ordered >> 31 ? ordered & 0x7fffffffu : ~ordered);
      if (i == 0) largest = logit;
      const float weight = __expf(logit - largest);
      total += weight;
      if (lane == i) {
        share = weight;
        o.ids[warp * experts::kTop + i] = pads ? -1 : ~(unsigned)top;
      }
    }
    if (lane < experts::kTop) o.shares[warp * experts::kTop + lane] = share / total;
  }
  // a block's shared memory is there until the first has read it
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

struct Combined {
  const float* experts;  // [rows * kTop][k], each times its share
  const int* ids;        // [rows * kTop]
  const bf16* residual;  // [rows][k], or null: no sum and no norm
  const bf16* norm;      // [k], of the norm that follows
  bf16* sum;             // [rows][k]: the experts' sum, and residual
  bf16* normed;          // [rows][k]
  int k;
  float epsilon;
};

struct Normed {
  const bf16* x;         // [rows][k]
  const bf16* residual;  // [rows][k]
  const bf16* norm;      // [k]
  bf16* sum;             // [rows][k]: x + residual
  bf16* normed;          // [rows][k]
  int k;
  float epsilon;
};

// RMSNorm of a row, of which each thread of the block has eight columns, or none.
__device__ __forceinline__ void normalize_row(Eight v, const Eight& norm, bf16* to, bool mine, int k, float epsilon) {
  __shared__ float squares[kThreads / 32];
  const float square = sum_of_warp(v.squares());
  if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = square;
  __syncthreads();
  if (!mine) return;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kThreads / 32; i++) sum += squares[i];
  v.normalize(rsqrtf(sum / k + epsilon), norm);
  *reinterpret_cast<uint4*>(to) = v.rounded();
}

// A block a row: a row's four experts in one, and the residual and RMSNorm that follow.
__device__ __forceinline__ void combine(const Combined& o) {
  const int row = blockIdx.x, column = threadIdx.x * 8;
  const size_t at = (size_t)row * o.k + column;
  const bool mine = column < o.k;
  Eight v = {}, norm = {};
  if (mine && o.residual) norm.add(o.norm + column);
  take_turn();
  if (mine) {
#pragma unroll
    for (int slot = row * experts::kTop; slot < (row + 1) * experts::kTop; slot++)
      if (o.ids[slot] >= 0) v.add(o.experts + (size_t)slot * o.k + column);
    if (o.residual) v.add(o.residual + at);
    *reinterpret_cast<uint4*>(o.sum + at) = v.rounded();
  }
  if (o.residual) normalize_row(v, norm, o.normed + at, mine, o.k, o.epsilon);
}

// A block a row: residual and RMSNorm alone.
__device__ __forceinline__ void add_and_normalize(const Normed& o) {
  const int column = threadIdx.x * 8;
  const size_t at = (size_t)blockIdx.x * o.k + column;
  const bool mine = column < o.k;
  Eight v = {}, norm = {};
  if (mine) norm.add(o.norm + column);
  take_turn();
  if (mine) {
    v.add(o.x + at);
    v.add(o.residual + at);
    *reinterpret_cast<uint4*>(o.sum + at) = v.rounded();
  }
  normalize_row(v, norm, o.normed + at, mine, o.k, o.epsilon);
}

}  // namespace layer
