// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// gpt-oss's experts for one to 16 rows, read where FlashInfer's CUTLASS MoE keeps them: a column's k lie
// in a row, as in the checkpoint; all of up before all of gate; scales in tiles of 128 columns x 4 groups,
// 512 bytes (CUTLASS's SfAtom). No atomics; a row's result does not depend on the other rows.
//
// A lane loads 16 bytes, which is a whole group of 32 k, so the four lanes that a product adds up have four
// scales. So a row is four columns of the product, one a group: each is zero but for the lane that has the
// group. That makes two rows of eight columns. Scales are applied once for 128 k.
#pragma once
#include "experts.cuh"

namespace row_major {

using experts::kTop;
// x and out are those of experts.cuh. weights: [experts][stride][pitch / 2]; scales: [experts]
// [stride / 128][pitch / 128] tiles; bias: [experts][stride]; gate_up: gate begins at stride / 2.
using experts::Operands;
using experts::pair;

// A tile is 32 columns: four times 8 together, 32 apart, whose scales for four groups are 16 bytes.
constexpr int kTile = 32, kStep = 128;  // columns of a tile, k of a step

// Where the scale of a group of a column lies, of `pitch` k.
__host__ __device__ inline int scale_at(int column, int group, int pitch) {
  return (column / 128 * (pitch / 128) + group / 4) * 512 + column % 32 * 16 + column % 128 / 32 * 4 + group % 4;
}
__host__ __device__ inline int column_of(int tile, int column) {
  return tile / 4 * 128 + column / 8 * 32 + tile % 4 * 8 + column % 8;
}
__host__ __device__ inline int tiles(int n) { return (n + 127) / 128 * 4; }
__host__ __device__ inline int in_shared(int k) { return (k + 127) / 128 * 128 + 32; }  // elements of a row of x
// Where 8 k of a row lie in shared memory: those of four groups side by side.
__host__ __device__ inline int chunk_at(int chunk) { return chunk / 16 * 16 + chunk % 4 * 4 + chunk / 4 % 4; }

// Where it stands: loads that the compiler moves up take registers.
__device__ __forceinline__ uint4 load_shared(unsigned from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
  return v;
}

struct Words {  // of columns g, g + 32, g + 64, g + 96 of a tile, in a step
  uint4 v[4] = {}, scales = {};
};

// Block (slot, TILES tiles): for up to ROWS of the rows that chose the slot's expert. Blocks of an expert follow
// one another, so that what is read again is in L2. gate_up: tiles of up and of gate in turn become SWIGLU-OAI.
// down: times the router's weight; whoever reads the result adds a row's four. Shared memory:
// ROWS * in_shared(k) * 2 bytes. MOST is the most rows of a launch.
//
// What the router wrote is there when gate_up lets the next kernel begin. That is down, which so can choose, too,
// and loads its first weights before it waits for gate_up.
template <int WARPS, int U, int TILES, int MOST, bool GATE_UP>
__device__ __forceinline__ void product(const Operands& o) {
  extern __shared__ __align__(16) bf16 shared[];
  constexpr int ROWS = MOST < 2 ? MOST : 2;
  constexpr int kWarps = WARPS / TILES, kColumns = kTile * TILES;  // warps that share a tile
  static_assert(!GATE_UP || TILES % 2 == 0, "up and gate of a column are in one block");
  __shared__ float sums[kWarps][kColumns * ROWS];
  __shared__ __align__(16) bf16 bias[kColumns], zeros[kStep];
  __shared__ int mine[ROWS], count;  // slots
  __shared__ float shares[ROWS];
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int block_tile = threadIdx.x / 32 % TILES, warp = threadIdx.x / 32 / TILES;
  auto tile_of = [&](int i) { return GATE_UP ? (blockIdx.y * TILES + i) / 2 : blockIdx.y * TILES + i; };
  auto own = [&] { return GATE_UP ? o.n / 2 : o.n; };
  if (GATE_UP) wait_for_turn();
  begin_next();

  using Group = experts::Group<WARPS, MOST, ROWS, GATE_UP, true>;
  const Group group(o, blockIdx.x);
  if (group.expert < 0) {
    // If no row has an expert, all blocks of down end here: not before the ids that gate_up writes are there.
    if (!GATE_UP && group.pads) wait_for_turn();
    return;
  }

  // a tile's columns that only pad: another one, whose sum is not used
  const int first = tile_of(block_tile) / 4 * 128 + tile_of(block_tile) % 4 * 8 + g, columns = own() - first;
  const unsigned begin = group.expert * o.stride + (GATE_UP && block_tile % 2 ? o.stride / 2 : 0);
  const uint4* w = o.weights + ((begin + first) * (o.pitch / 32) + q);
  const unsigned s = begin * (o.pitch / 32) / 16 + scale_at(first, 0, o.pitch) / 16;
  auto steps = [&] { return (o.k + kStep - 1) / kStep; };
  Words words[U];
  auto load = [&](Words& to, int step) {
    asm volatile("" : "+r"(step));  // an address is computed where it is used, not kept
    if (step < steps()) {  // with what only pads, for which x is zero
#pragma unroll
      for (int i = 0; i < 4; i++) to.v[i] = __ldcs(w + step * 4 + (i * 32 < columns ? i * o.pitch : 0));
      to.scales = __ldcs(reinterpret_cast<const uint4*>(o.scales) + (s + step * 32));
    }
  };
#pragma unroll
  for (int u = 0; u < U; u++) load(words[u], warp + u * kWarps);

  // what the end needs, early
  if (const int at = threadIdx.x * 8; at < kColumns) {
    const int column = column_of(tile_of(at / kTile), at % kTile);
    if (column < own())
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(bias + at)),
                   "l"(o.bias + (size_t)group.expert * o.stride + (GATE_UP && at / kTile % 2 ? o.stride / 2 : 0) + column)
                   : "memory");
  }
  if (threadIdx.x < kStep / 2) reinterpret_cast<unsigned*>(zeros)[threadIdx.x] = 0;
  if (!GATE_UP) wait_for_turn();
  group.list(o, mine, shares, count);
  const int pitch = in_shared(o.k);
  uint4* to = reinterpret_cast<uint4*>(shared);
  for (auto left = group.slots; left; to += pitch / 8, left &= left - 1) {
    const int from = Group::Of::first(left);
    const uint4* x = reinterpret_cast<const uint4*>(o.x + (size_t)(GATE_UP ? from / kTop : from) * o.k);
    for (int i = threadIdx.x; i < steps() * 16; i += WARPS * 32) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (i < o.k / 8) v = up(x[i]);
      // k and k + 4 side by side, as nibbles p and p + 4
      to[chunk_at(i)] = make_uint4(__byte_perm(v.x, v.z, 0x5410), __byte_perm(v.x, v.z, 0x7632),
                                   __byte_perm(v.y, v.w, 0x5410), __byte_perm(v.y, v.w, 0x7632));
    }
  }
  __syncthreads();

  // of a row that is not there a lane reads what there is: those columns of the product are left out
  const int there = experts::thread_again();
  const bool has = g % 4 == q;
  const unsigned x = __cvta_generic_to_shared(has ? shared + min(g / 4, ROWS - 1) * pitch + q * 8 : zeros);
  const int shift = there % 2 * 16;  // a lane has columns 2q, 2q + 1 of the product
  float acc[2][4] = {};
  for (int next = there / 32 / TILES; next < steps(); next += U * kWarps) {
#pragma unroll
    for (int u = 0; u < U; u++) {
      const int step = next + u * kWarps;
      if (step >= steps()) break;
      const unsigned from = x + (has ? step * kStep * 2 : 0);
      float d[2][4] = {};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        unsigned a[2][8];
#pragma unroll
        for (int t = 0; t < 2; t++)
#pragma unroll
          for (int p = 0; p < 4; p++) {
            a[t][2 * p] = pair((&words[u].v[2 * t].x)[j], p);
            a[t][2 * p + 1] = pair((&words[u].v[2 * t + 1].x)[j], p);
          }
        const uint4 row = load_shared(from + j * 64);
#pragma unroll
        for (int t = 0; t < 2; t++) {
          mma(d[t], a[t][0], a[t][1], a[t][2], a[t][3], row.x, row.y);
          mma(d[t], a[t][4], a[t][5], a[t][6], a[t][7], row.z, row.w);
        }
      }
#pragma unroll
      for (int t = 0; t < 2; t++) {
        const unsigned low = (&words[u].scales.x)[2 * t] >> shift, high = (&words[u].scales.x)[2 * t + 1] >> shift;
        acc[t][0] = fmaf(d[t][0], scale(low & 255), acc[t][0]);
        acc[t][1] = fmaf(d[t][1], scale(low >> 8 & 255), acc[t][1]);
        acc[t][2] = fmaf(d[t][2], scale(high & 255), acc[t][2]);
        acc[t][3] = fmaf(d[t][3], scale(high >> 8 & 255), acc[t][3]);
      }
      load(words[u], step + U * kWarps);
    }
  }
  const int thread = experts::thread_again();
  const int row_g = thread % 32 / 4, row_q = thread % 4, its_warp = thread / 32 / TILES, its_tile = thread / 32 % TILES;
#pragma unroll
  for (int t = 0; t < 2; t++) {
    float low = acc[t][0] + acc[t][1], high = acc[t][2] + acc[t][3];
    low += __shfl_xor_sync(~0u, low, 1);
    high += __shfl_xor_sync(~0u, high, 1);
    if (row_q / 2 < ROWS)
      sums[its_warp][row_q / 2 * kColumns + its_tile * kTile + (2 * t + row_q % 2) * 8 + row_g] = row_q % 2 ? high : low;
  }
  asm volatile("cp.async.wait_all;" ::: "memory");  // bias, shares
  __syncthreads();
  auto value = [&](int row, int column) {  // of the product, with its bias
    float sum = 0;
#pragma unroll
    for (int k = 0; k < kWarps; k++) sum += sums[k][row * kColumns + column];
    return sum * kBack + __bfloat162float(bias[column]);
  };
  constexpr int kOutputs = GATE_UP ? kColumns / 2 : kColumns;
  for (int i = thread; i < count * kOutputs; i += WARPS * 32) {
    const int row = i / kOutputs, output = i % kOutputs, tile = output / kTile * (GATE_UP ? 2 : 1);
    const int n = column_of(tile_of(tile), output % kTile), column = tile * kTile + output % kTile;
    if (n >= own()) continue;
    if constexpr (GATE_UP) {
      const float gate = fminf(value(row, column + kTile), 7.f);
      const float linear = fminf(fmaxf(value(row, column), -7.f), 7.f);
      static_cast<bf16*>(o.out)[(size_t)mine[row] * own() + n] =
          __float2bfloat16((linear + 1.f) * gate / (1.f + __expf(-1.702f * gate)));
    } else {
      static_cast<float*>(o.out)[(size_t)mine[row] * own() + n] = shares[row] * value(row, column);
    }
  }
}

}  // namespace row_major
