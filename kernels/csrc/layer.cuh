// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// What lies between the products of a gpt-oss layer: residual and RMSNorm for any number of rows, with
// the router's logits, or the sum of a row's experts, for one to 16.
#pragma once
#include "experts.cuh"

namespace layer {

constexpr int kThreads = 512;
constexpr int kMostHidden = 3072;

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
  bf16* sum;             // [rows][k]: x + residual
  bf16* normed;          // [rows][k]: the sum, normalized
  bf16* logits;          // [rows][n]
  int* ids;              // [rows * kTop]: kUnknown, until experts are chosen by the logits
  int k, n, rows;
  float epsilon;
};

// sum, RMSNorm and router. Block (eight experts, four rows): each normalizes its rows for itself. Like the
// product of BF16 that it replaces, a logit is rounded to BF16; who reads the logits chooses (experts::choose).
// Shared memory: kRows * (k + 32) * 2 bytes.
constexpr int kRows = 4, kExperts = 8;

__device__ __forceinline__ void route(const Routed& o) {
  extern __shared__ __align__(16) bf16 shared[];
  constexpr int kWarps = kThreads / 32, kShare = kThreads / kRows, kTiles = kMostHidden / 64 / kWarps;
  constexpr int kRuns = kMostHidden / 8 / kShare;
  __shared__ float squares[kWarps], sums[kWarps][kRows * kExperts];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int tiles = o.k / 64, pitch = o.k + 32;
  const uint4* from = reinterpret_cast<const uint4*>(o.weights + (size_t)(blockIdx.x * kExperts + g) * o.k) + q;
  uint4 v[kTiles][2];
#pragma unroll
  for (int i = 0; i < kTiles; i++)
    if (warp + i * kWarps < tiles) {
      v[i][0] = __ldcs(from + (warp + i * kWarps) * 8);
      v[i][1] = __ldcs(from + (warp + i * kWarps) * 8 + 4);
    }
  // a row has kShare threads, a thread some runs of eight columns
  const int row = threadIdx.x / kShare, first = threadIdx.x % kShare * 8, rows = o.rows - blockIdx.y * kRows;
  const size_t begin = (size_t)(blockIdx.y * kRows + row) * o.k;
#pragma unroll
  for (int i = 0; i < kRuns; i++)
    if (first + i * kShare * 8 < o.k)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(o.norm + first + i * kShare * 8));
  const float bias = __bfloat162float(o.bias[blockIdx.x * kExperts + threadIdx.x % kExperts]);
  take_turn();

  Eight part[kRuns] = {};
  float square = 0;
  if (row < rows) {
#pragma unroll
    for (int i = 0; i < kRuns; i++) {
      const int column = first + i * kShare * 8;
      if (column >= o.k) continue;
      part[i].add(o.x + begin + column);
      part[i].add(o.residual + begin + column);
      square += part[i].squares();
    }
  }
  square = sum_of_warp(square);
  if (lane == 0) squares[warp] = square;
  __syncthreads();
  if (row < rows) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kWarps / kRows; i++) sum += squares[row * (kWarps / kRows) + i];
    const float factor = rsqrtf(sum / o.k + o.epsilon);
#pragma unroll
    for (int i = 0; i < kRuns; i++) {
      const int column = first + i * kShare * 8;
      if (column >= o.k) continue;
      const bool writes = column / 8 % gridDim.x == blockIdx.x;
      if (writes) *reinterpret_cast<uint4*>(o.sum + begin + column) = part[i].rounded();
      Eight weight = {};
      weight.add(o.norm + column);
      part[i].normalize(factor, weight);
      const uint4 rounded = part[i].rounded();
      if (writes) *reinterpret_cast<uint4*>(o.normed + begin + column) = rounded;
      *reinterpret_cast<uint4*>(shared + row * pitch + column) = rounded;
    }
  }
  __syncthreads();

  float acc[4] = {};  // half of the product's 16 weights, and of its eight rows, are none
  const bf16* x = shared + min(g, kRows - 1) * pitch + 8 * q;
#pragma unroll
  for (int i = 0; i < kTiles; i++) {
    const int tile = warp + i * kWarps;
    if (tile >= tiles) break;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint4 w = v[i][h], b = *reinterpret_cast<const uint4*>(x + tile * 64 + 32 * h);
      mma(acc, w.x, 0, w.y, 0, b.x, b.y);
      mma(acc, w.z, 0, w.w, 0, b.z, b.w);
    }
  }
  if (q < kRows / 2) sums[warp][2 * q * kExperts + g] = acc[0], sums[warp][(2 * q + 1) * kExperts + g] = acc[1];
  __syncthreads();
  const int at = threadIdx.x;
  if (blockIdx.x == 0 && at < min(rows, kRows) * experts::kTop)
    o.ids[blockIdx.y * kRows * experts::kTop + at] = experts::kUnknown;
  if (at >= min(rows, kRows) * kExperts) return;
  float sum = bias;
#pragma unroll
  for (int i = 0; i < kWarps; i++) sum += sums[i][at];
  o.logits[(size_t)(blockIdx.y * kRows + at / kExperts) * o.n + blockIdx.x * kExperts + at % kExperts] = __float2bfloat16(sum);
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
