// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// gpt-oss's experts for one to eight rows, read where Marlin keeps them. An expert that several rows
// chose is read once. No atomics; a row's result does not depend on the other rows.
#pragma once
#include "mx.cuh"

namespace experts {

constexpr int kTop = 4;  // experts a row; a slot is one of a row's experts, so there are up to 32

// Marlin's order: tiles of 16 k x 64 n,
// 512 bytes, a lane 16 bytes. Nibble p of its 32-bit word is this weight of the tile:
__host__ __device__ inline void place(int lane, int word, int p, int& k, int& n) {
  const int order[8] = {0, 2, 4, 6, 1, 3, 5, 7}, rows[4] = {0, 1, 8, 9};
  k = lane % 4 * 2 + rows[order[p] % 4];
  n = word * 16 + lane / 4 + order[p] / 4 * 8;
}

// Where the scale of a column lies among those of 64, and a bias among those of 32.
__host__ __device__ inline int scale_at(int column) {
  const int j = column / 8, exchanged = j % 4 == 1 ? j + 1 : j % 4 == 2 ? j - 1 : j;
  return column % 8 * 8 + exchanged;
}
__host__ __device__ inline int bias_at(int column) {
  return column % 8 / 2 * 8 + column / 8 * 2 + column % 2;
}

__device__ __forceinline__ unsigned pair(unsigned w, int p) {  // nibbles p and p + 4
  const int sign = 12 - 4 * p, rest = 6 - 4 * p;
  const unsigned a = sign >= 0 ? w << sign : w >> -sign, b = rest >= 0 ? w << rest : w >> -rest;
  return (a & 0x80008000u) | (b & 0x01c001c0u);
}

struct Operands {
  const bf16* x;                // gate_up: [rows][k]; down: [slots][k]
  const uint4* weights;         // [experts][pitch / 16][stride / 64] tiles
  const unsigned char* scales;  // [experts][pitch / 32][stride]
  const bf16* bias;             // [experts][stride]
  const int* ids;               // [slots], the experts that the router chose; -1: a row that pads
  const float* shares;          // [slots], the router's weights
  void* out;                    // gate_up: BF16 [slots][n / 2]; down: float [slots][n]
  int k, n, stride, rows;       // stride: n, and the columns that only pad
  int pitch;                    // k, and what only pads
};

// A slot's expert, and who else chose it.
struct Sharers {
  int expert;      // -1: the row pads
  unsigned slots;  // a bit for each that has this expert

  __device__ __forceinline__ Sharers(const Operands& o, int lane, int slot) {
    const int id = lane < o.rows * kTop ? o.ids[lane] : -1;
    expert = __shfl_sync(~0u, id, slot);
    slots = __ballot_sync(~0u, id == expert);
  }
  __device__ __forceinline__ bool has(int row) const { return slots >> (row * kTop) & 15; }
  __device__ __forceinline__ int slot_of(int row) const {
    return row * kTop - 1 + __ffs(slots >> (row * kTop) & 15);
  }
};

// Block (64 * TILES columns, slot): for all rows that chose the slot's expert, unless an earlier slot
// has it. gate_up: gate and up, which lie in turn, become SWIGLU-OAI. down: times the router's weight;
// whoever reads the result adds a row's four. Shared memory: ROWS * (k + 32) * 2 bytes. Two blocks a
// multiprocessor (three from two rows on) are the fastest on an H200: fewer registers a thread. ROWS are
// the most rows.
template <int WARPS, int U, int TILES, int ROWS, bool GATE_UP>
__device__ __forceinline__ void product(const Operands& o) {
  extern __shared__ __align__(16) bf16 shared[];
  constexpr int kWarps = WARPS / TILES, kColumns = 64 * TILES;  // warps that share the k of a tile
  __shared__ float sums[kWarps][kColumns * ROWS];
  const int slot = blockIdx.y, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int column_tile = threadIdx.x / 32 % TILES, warp = threadIdx.x / 32 / TILES;
  const int groups = o.k / 32, tile = blockIdx.x * TILES + column_tile;
  take_turn();
  const Sharers sharers(o, lane, slot);
  if (sharers.expert < 0 || sharers.slots << (31 - slot) << 1) return;
  const int pitch_w = o.stride / 2;  // 16-byte words from one 16 k to the next
  const size_t begin = (size_t)sharers.expert * (o.pitch / 32) + warp;
  const uint4* w = o.weights + begin * o.stride + tile * 32 + lane;
  const unsigned char* s = o.scales + begin * o.stride + tile * 64 + g * 8;
  uint4 v[U][2];
  uint2 z[U];
  auto load = [&](int u, int group) {  // one group after another
    if (group < groups && (TILES == 1 || tile < o.n / 64)) {
      v[u][0] = __ldcs(w);
      v[u][1] = __ldcs(w + pitch_w);
      z[u] = __ldcs(reinterpret_cast<const uint2*>(s));
      w += kWarps * 2 * pitch_w;
      s += kWarps * o.stride;
    } else {
      v[u][0] = v[u][1] = make_uint4(0, 0, 0, 0);
      z[u] = make_uint2(0, 0);
    }
  };
#pragma unroll
  for (int u = 0; u < U; u++) load(u, warp + u * kWarps);

  // what the end needs, early
  __shared__ __align__(16) bf16 bias[kColumns];
  __shared__ int mine[ROWS];  // the slot of each row that has this expert, or -1
  __shared__ float shares[ROWS];
  if (const int at = threadIdx.x * 8; at < kColumns && blockIdx.x * kColumns + at < o.n)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(bias + at)),
                 "l"(o.bias + (size_t)sharers.expert * o.stride + blockIdx.x * kColumns + at)
                 : "memory");
  if (const int row = threadIdx.x - 32; row >= 0 && row < ROWS) {
    mine[row] = sharers.has(row) ? sharers.slot_of(row) : -1;
    if (!GATE_UP && sharers.has(row)) shares[row] = o.shares[sharers.slot_of(row)];
  }
  // x in the order of a lane's k: 2q, 2q + 1, 2q + 8, 2q + 9 of two tiles are 16 bytes
  const int pitch = o.k + 32;
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
    if (!sharers.has(row)) continue;
    const size_t from = GATE_UP ? row : sharers.slot_of(row);
    const unsigned* x = reinterpret_cast<const unsigned*>(o.x + from * o.k);
    unsigned* to = reinterpret_cast<unsigned*>(shared + row * pitch);
    for (int i = threadIdx.x; i < o.k / 2; i += WARPS * 32)
      to[i / 16 * 16 + i % 4 * 4 + i / 8 % 2 * 2 + i / 4 % 2] = up(x[i]);
  }
  __syncthreads();

  // a lane whose row is none of them reads what there is: that column of the product is left out
  const bf16* x = shared + min(g, ROWS - 1) * pitch + q * 8;
  float acc[4][4] = {};
  for (int first = warp; first < groups; first += U * kWarps) {
#pragma unroll
    for (int u = 0; u < U; u++) {
      const int group = first + u * kWarps;
      if (group >= groups) break;
      const uint4 row = *reinterpret_cast<const uint4*>(x + group * 32);
      const unsigned low[4] = {v[u][0].x, v[u][0].y, v[u][0].z, v[u][0].w};
      const unsigned high[4] = {v[u][1].x, v[u][1].y, v[u][1].z, v[u][1].w};
      const uint2 scales = z[u];
      load(u, group + U * kWarps);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float d[4] = {};
        mma(d, pair(low[i], 0), pair(low[i], 2), pair(low[i], 1), pair(low[i], 3), row.x, row.y);
        mma(d, pair(high[i], 0), pair(high[i], 2), pair(high[i], 1), pair(high[i], 3), row.z, row.w);
        const unsigned word = i < 2 ? scales.x : scales.y;
        const int at = i % 2 * 8;
        add_scaled(acc[i], d, scale((word >> at) & 255), scale((word >> (at + 16)) & 255));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (2 * q + j % 2 < ROWS)
        sums[warp][(2 * q + j % 2) * kColumns + column_tile * 64 + i * 16 + g + j / 2 * 8] = acc[i][j];
  asm volatile("cp.async.wait_all;" ::: "memory");  // bias
  __syncthreads();
  auto value = [&](int row, int column) {  // of the product, with its bias
    float sum = 0;
#pragma unroll
    for (int k = 0; k < kWarps; k++) sum += sums[k][row * kColumns + column];
    return sum * kBack + __bfloat162float(bias[column / 32 * 32 + bias_at(column % 32)]);
  };
  constexpr int kOutputs = GATE_UP ? kColumns / 2 : kColumns;
  for (int i = threadIdx.x; i < ROWS * kOutputs; i += WARPS * 32) {
    const int row = i / kOutputs, column = i % kOutputs, n = blockIdx.x * kOutputs + column;
    const int at = mine[row];
    if (at < 0 || n >= (GATE_UP ? o.n / 2 : o.n)) continue;
    if constexpr (GATE_UP) {
      const float gate = fminf(value(row, 2 * column), 7.f);
      const float linear = fminf(fmaxf(value(row, 2 * column + 1), -7.f), 7.f);
      static_cast<bf16*>(o.out)[(size_t)at * (o.n / 2) + n] =
          __float2bfloat16((linear + 1.f) * gate / (1.f + __expf(-1.702f * gate)));
    } else {
      static_cast<float*>(o.out)[(size_t)at * o.n + n] = shares[row] * value(row, column);
    }
  }
}

}  // namespace experts
