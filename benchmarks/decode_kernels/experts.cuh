// gpt-oss's experts for one to eight rows, read where Marlin keeps them. An expert that several rows
// chose is read once. No atomics; a row's result does not depend on the other rows.
#pragma once
#include "mx.cuh"

namespace experts {

constexpr int kTop = 4;  // experts a row; a slot is one of a row's experts

// Marlin's order in vLLM 0.31.0 (tests/patches/probes/marlin_layout.py, too): tiles of 16 k x 64 n,
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
  const bf16* x;                // gate_up: [ROWS][k]; down: [slots][k]
  const uint4* weights;         // [experts][k / 16][n / 64] tiles
  const unsigned char* scales;  // [experts][k / 32][n]
  const bf16* bias;             // [experts][n]
  const int* ids;               // [slots], the experts that the router chose; -1: a row that pads
  const float* shares;          // [slots], the router's weights
  void* out;                    // gate_up: BF16 [slots][n / 2]; down: float [slots][n]
  int k, n;
};

// Block (64 * TILES columns, slot): for all rows that chose the slot's expert, unless an earlier slot
// has it. gate_up: gate and up, which lie in turn, become SWIGLU-OAI. down: times the router's weight;
// whoever reads the result adds a row's four. Shared memory: ROWS * (k + 32) * 2 bytes. Two blocks a
// multiprocessor (three from two rows on) are the fastest on an H200: fewer registers a thread.
template <int WARPS, int U, int TILES, int ROWS, bool GATE_UP>
__global__ void __launch_bounds__(WARPS * 32, ROWS == 1 ? 2 : 3) product(Operands o) {
  extern __shared__ __align__(16) bf16 shared[];
  constexpr int kWarps = WARPS / TILES, kColumns = 64 * TILES;  // warps that share the k of a tile
  __shared__ float sums[kWarps][kColumns * ROWS];
  const int slot = blockIdx.y, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int column_tile = threadIdx.x / 32 % TILES, warp = threadIdx.x / 32 / TILES;
  const int groups = o.k / 32, tile = blockIdx.x * TILES + column_tile;
  take_turn();
  const int expert = o.ids[slot];
  if (expert < 0) return;
  const size_t pitch_w = o.n / 2;  // 16-byte words from one 16 k to the next
  const uint4* w = o.weights + (size_t)expert * (o.k / 16) * pitch_w + tile * 32 + lane;
  const unsigned char* s = o.scales + (size_t)expert * groups * o.n + tile * 64 + g * 8;
  uint4 v[U][2];
  uint2 z[U];
  auto load = [&](int u, int group) {
    if (group < groups && tile < o.n / 64) {
      v[u][0] = __ldcs(w + (size_t)(2 * group) * pitch_w);
      v[u][1] = __ldcs(w + (size_t)(2 * group + 1) * pitch_w);
      z[u] = __ldcs(reinterpret_cast<const uint2*>(s + (size_t)group * o.n));
    } else {
      v[u][0] = v[u][1] = make_uint4(0, 0, 0, 0);
      z[u] = make_uint2(0, 0);
    }
  };
#pragma unroll
  for (int u = 0; u < U; u++) load(u, warp + u * kWarps);

  int mine[ROWS];  // the slot of each row that has this expert, or -1
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
    mine[row] = -1;
#pragma unroll
    for (int at = row * kTop; at < (row + 1) * kTop; at++) {
      if (at != slot && o.ids[at] != expert) continue;
      if (at < slot) return;
      mine[row] = at;
    }
  }
  // x in the order of a lane's k: 2q, 2q + 1, 2q + 8, 2q + 9 of two tiles are 16 bytes
  const int pitch = o.k + 32;
#pragma unroll
  for (int row = 0; row < ROWS; row++) {
    if (mine[row] < 0) continue;
    const size_t from = GATE_UP ? row : mine[row];
    const unsigned* x = reinterpret_cast<const unsigned*>(o.x + from * o.k);
    unsigned* to = reinterpret_cast<unsigned*>(shared + row * pitch);
    for (int i = threadIdx.x; i < o.k / 2; i += WARPS * 32)
      to[i / 16 * 16 + i % 4 * 4 + i / 8 % 2 * 2 + i / 4 % 2] = up(x[i]);
  }
  __syncthreads();

  bool active = false;  // whether the lane's row is one of them
#pragma unroll
  for (int row = 0; row < ROWS; row++) active |= g == row && mine[row] >= 0;
  const bf16* x = shared + (active ? g : 0) * pitch + q * 8;
  float acc[4][4] = {};
  for (int first = warp; first < groups; first += U * kWarps) {
#pragma unroll
    for (int u = 0; u < U; u++) {
      const int group = first + u * kWarps;
      if (group >= groups) break;
      const uint4 row =
          active ? *reinterpret_cast<const uint4*>(x + group * 32) : make_uint4(0, 0, 0, 0);
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
  __syncthreads();

  auto value = [&](int row, int column) {  // of the product, with its bias
    float sum = 0;
#pragma unroll
    for (int k = 0; k < kWarps; k++) sum += sums[k][row * kColumns + column];
    const int n = blockIdx.x * kColumns + column;
    return sum * kBack +
           __bfloat162float(o.bias[(size_t)expert * o.n + n / 32 * 32 + bias_at(n % 32)]);
  };
  constexpr int kOutputs = GATE_UP ? kColumns / 2 : kColumns;
  for (int i = threadIdx.x; i < ROWS * kOutputs; i += WARPS * 32) {
    const int row = i / kOutputs, column = i % kOutputs, n = blockIdx.x * kOutputs + column;
    int at = -1;
#pragma unroll
    for (int r = 0; r < ROWS; r++)
      if (r == row) at = mine[r];
    if (at < 0 || n >= (GATE_UP ? o.n / 2 : o.n)) continue;
    if constexpr (GATE_UP) {
      const float gate = fminf(value(row, 2 * column), 7.f);
      const float linear = fminf(fmaxf(value(row, 2 * column + 1), -7.f), 7.f);
      static_cast<bf16*>(o.out)[(size_t)at * (o.n / 2) + n] =
          __float2bfloat16((linear + 1.f) * gate / (1.f + __expf(-1.702f * gate)));
    } else {
      static_cast<float*>(o.out)[(size_t)at * o.n + n] = o.shares[at] * value(row, column);
    }
  }
}

}  // namespace experts
