// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// gpt-oss's experts for one to 16 rows, read where Marlin keeps them. An expert is read once for up to eight
// of the rows that chose it. No atomics; a row's result does not depend on the other rows.
#pragma once
#include "mx.cuh"

namespace experts {

constexpr int kTop = 4;       // experts a row; a slot is one of a row's experts, so there are up to 64
constexpr int kRows = 8;      // of an expert, that a block takes at most
constexpr int kUnknown = -2;  // in place of an expert: gate_up has yet to choose

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
  int* ids;                     // [slots], the experts that the router chose; -1: a row that pads; or kUnknown
  float* shares;                // [slots], the router's weights
  const bf16* logits;           // [rows][experts], the router's; null where ids and shares are given
  const bool* padding;          // [rows], with logits: whether a row only pads; or null
  void* out;                    // gate_up: BF16 [slots][n / 2]; down: float [slots][n]
  int k, n, stride, rows;       // stride: n, and the columns that only pad
  int pitch;                    // k, and what only pads
  int experts;                  // of which a row has logits: a multiple of four up to 128
};

// A row's four largest logits, of which each lane has four: lane i of the first four gets the i-th expert, and
// its share, the softmax of the four. Of equal ones the first expert counts as larger; NaN counts as largest.
__device__ __forceinline__ int choose(uint2 v, int experts, int lane, float& share) {
  unsigned key[4];  // a logit in an order of integers, and the expert
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const unsigned word = i < 2 ? v.x : v.y, bits = i % 2 ? word & 0xffff0000u : word << 16;
    key[i] = lane * 4 < experts ? (bits >> 31 ? ~bits & 0xffff0000u : bits | 0x80000000u) | (0xffff - lane * 4 - i) : 0;
  }
  auto order = [&](int i, int j) {
    const unsigned a = key[i], b = key[j];
    key[i] = max(a, b), key[j] = min(a, b);
  };
  order(0, 1), order(2, 3), order(0, 2), order(1, 3), order(1, 2);
  unsigned mine = 0;
  float largest = 0, total = 0;
#pragma unroll
  for (int i = 0; i < kTop; i++) {
    const unsigned top = __reduce_max_sync(~0u, key[0]);
    if (key[0] == top) key[0] = key[1], key[1] = key[2], key[2] = key[3], key[3] = 0;
    const float logit = __uint_as_float(top >> 31 ? top & 0x7fff0000u : ~top & 0xffff0000u);
    if (i == 0) largest = logit;
    const float weight = __expf(logit - largest);
    total += weight;
    if (lane == i) mine = top, share = weight;
  }
  share /= total;
  return 0xffff - (mine & 0xffff);
}

// threadIdx.x anew, so that no register keeps what was computed from it before.
__device__ __forceinline__ int thread_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

template <bool WIDE> struct Bits {  // of up to 32 slots, or 64
  using Type = unsigned;
  __device__ __forceinline__ static int count(Type v) { return __popc(v); }
  __device__ __forceinline__ static int first(Type v) { return __ffs(v) - 1; }
};
template <> struct Bits<true> {
  using Type = unsigned long long;
  __device__ __forceinline__ static int count(Type v) { return __popcll(v); }
  __device__ __forceinline__ static int first(Type v) { return __ffsll(v) - 1; }
};

// The slots that a block takes: its own and the next ones that have the expert, ROWS at most. It takes none if an
// earlier slot's block takes its own.
//
// Blocks of gate_up that find no choice choose, each for itself and all alike; the first block's is written for
// those that begin later and for other kernels. A kernel that does not wait for gate_up may find a part of it, and
// then chooses, too (CHOOSES). Ids that are given are never kUnknown.
template <int WARPS, int MOST, int ROWS, bool GATE_UP, bool CHOOSES> struct Group {
  static constexpr int kWords = (MOST * kTop + 31) / 32;
  using Of = Bits<(kWords > 1)>;
  int expert;               // -1: there is nothing to do
  typename Of::Type slots;  // a bit each
  bool pads;                // the row of the block's own

  __device__ __forceinline__ Group(const Operands& o, int slot) {
    const int thread = thread_again(), lane = thread % 32;
    int row = MOST == 1 ? 0 : thread / 32;
    auto load = [&] {
      uint2 v = make_uint2(0, 0);
      if (row < o.rows && lane * 4 < o.experts)
        v = __ldcg(reinterpret_cast<const uint2*>(o.logits + row * o.experts) + lane);
      return v;
    };
    auto choice = [&](uint2 v) {
      const bool row_pads = o.padding && o.padding[row];
      float share = 0;
      const int found = choose(v, o.experts, lane, share), it = row_pads ? -1 : found;
      if (GATE_UP && blockIdx.x == 0 && blockIdx.y == 0 && lane < kTop)
        o.ids[row * kTop + lane] = it, o.shares[row * kTop + lane] = share;
      return it;
    };
    int id[kWords];
    bool unknown = false;
#pragma unroll
    for (int i = 0; i < kWords; i++) {
      id[i] = lane + 32 * i < o.rows * kTop ? __ldcg(o.ids + lane + 32 * i) : -1;
      unknown |= id[i] == kUnknown;
    }
    if constexpr (CHOOSES && MOST == 1) {  // each warp for itself
      if (__any_sync(~0u, unknown)) id[0] = choice(load());
    } else if constexpr (CHOOSES) {
      uint2 v = load();  // with the ids
      if (__syncthreads_or(unknown)) {
        __shared__ int chosen[kWords * 32];
        for (; row < o.rows; row += WARPS) {
          if (row >= WARPS) v = load();
          const int it = choice(v);
          if (lane < kTop) chosen[row * kTop + lane] = it;
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kWords; i++) id[i] = lane + 32 * i < o.rows * kTop ? chosen[lane + 32 * i] : -1;
      }
    }
    expert = __shfl_sync(~0u, slot < 32 ? id[0] : id[kWords - 1], slot % 32);
    slots = __ballot_sync(~0u, id[0] == expert);
    if (kWords > 1) slots |= (typename Of::Type)__ballot_sync(~0u, id[kWords - 1] == expert) << (kWords > 1 ? 32 : 0);
    const typename Of::Type own = ~(typename Of::Type)0 << slot;
    pads = expert < 0;
    if (Of::count(slots & ~own) % ROWS) expert = -1;
    slots &= own;
    typename Of::Type others = slots;
#pragma unroll
    for (int row = 0; row < ROWS; row++) others &= others - 1;
    slots ^= others;
  }

  // List them in shared memory, for down with their shares, by cp.async.
  __device__ __forceinline__ void list(const Operands& o, int* mine, float* shares, int& number) const {
    if (threadIdx.x == 0) number = Of::count(slots);
    const int slot = threadIdx.x - 32;
    if (slot < 0 || slot >= kWords * 32 || !(slots >> slot & 1)) return;
    const int at = Of::count(slots & (((typename Of::Type)1 << slot) - 1));
    mine[at] = slot;
    if (!GATE_UP)
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((unsigned)__cvta_generic_to_shared(shares + at)),
                   "l"(o.shares + slot)
                   : "memory");
  }
};

// Block (64 * TILES columns, slot): for up to ROWS of the rows that chose the slot's expert. gate_up: gate and
// up, which lie in turn, become SWIGLU-OAI. down: times the router's weight; whoever reads the result adds a
// row's four. Shared memory: ROWS * (k + 32) * 2 bytes. Two blocks a multiprocessor (three from two rows on) are
// the fastest on an H200: fewer registers a thread. MOST is the most rows of a launch.
template <int WARPS, int U, int TILES, int MOST, bool GATE_UP>
__device__ __forceinline__ void product(const Operands& o) {
  extern __shared__ __align__(16) bf16 shared[];
  constexpr int ROWS = MOST < kRows ? MOST : kRows;
  constexpr int kWarps = WARPS / TILES, kColumns = 64 * TILES;  // warps that share the k of a tile
  __shared__ float sums[kWarps][kColumns * ROWS];
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int column_tile = threadIdx.x / 32 % TILES, warp = threadIdx.x / 32 / TILES;
  const int groups = o.k / 32, tile = blockIdx.x * TILES + column_tile;
  take_turn();
  using Group = Group<WARPS, MOST, ROWS, GATE_UP, GATE_UP>;
  const Group group(o, blockIdx.y);
  if (group.expert < 0) return;
  const int pitch_w = o.stride / 2;  // 16-byte words from one 16 k to the next
  const size_t begin = (size_t)group.expert * (o.pitch / 32) + warp;
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
  __shared__ int mine[ROWS], count;  // slots
  __shared__ float shares[ROWS];
  if (const int at = threadIdx.x * 8; at < kColumns && blockIdx.x * kColumns + at < o.n)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((unsigned)__cvta_generic_to_shared(bias + at)),
                 "l"(o.bias + (size_t)group.expert * o.stride + blockIdx.x * kColumns + at)
                 : "memory");
  group.list(o, mine, shares, count);
  // x in the order of a lane's k: 2q, 2q + 1, 2q + 8, 2q + 9 of two tiles are 16 bytes
  const int pitch = o.k + 32;
  unsigned* to = reinterpret_cast<unsigned*>(shared);
  constexpr int kUnrolled = ROWS > 2 ? ROWS : 1;
  auto left = group.slots;
#pragma unroll kUnrolled
  for (int row = 0; row < ROWS; row++, to += pitch / 2, left &= left - 1) {
    if (!left) break;
    const int from = Group::Of::first(left);
    const unsigned* x = reinterpret_cast<const unsigned*>(o.x + (size_t)(GATE_UP ? from / kTop : from) * o.k);
    for (int i = threadIdx.x; i < o.k / 2; i += WARPS * 32)
      to[i / 16 * 16 + i % 4 * 4 + i / 8 % 2 * 2 + i / 4 % 2] = up(x[i]);
  }
  __syncthreads();

  // of a row that is not there a lane reads what there is: that column of the product is left out
  const bf16* x = shared + min(g, ROWS - 1) * pitch + q * 8;
  float acc[4][4] = {};
  for (int first = warp; first < groups; first += U * kWarps) {
#pragma unroll
    for (int u = 0; u < U; u++) {
      const int at = first + u * kWarps;
      if (at >= groups) break;
      const uint4 row = *reinterpret_cast<const uint4*>(x + at * 32);
      const unsigned low[4] = {v[u][0].x, v[u][0].y, v[u][0].z, v[u][0].w};
      const unsigned high[4] = {v[u][1].x, v[u][1].y, v[u][1].z, v[u][1].w};
      const uint2 scales = z[u];
      load(u, at + U * kWarps);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        float d[4] = {};
        mma(d, pair(low[i], 0), pair(low[i], 2), pair(low[i], 1), pair(low[i], 3), row.x, row.y);
        mma(d, pair(high[i], 0), pair(high[i], 2), pair(high[i], 1), pair(high[i], 3), row.z, row.w);
        const unsigned word = i < 2 ? scales.x : scales.y;
        const int bit = i % 2 * 8;
        add_scaled(acc[i], d, scale((word >> bit) & 255), scale((word >> (bit + 16)) & 255));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++)
      if (2 * q + j % 2 < ROWS)
        sums[warp][(2 * q + j % 2) * kColumns + column_tile * 64 + i * 16 + g + j / 2 * 8] = acc[i][j];
  asm volatile("cp.async.wait_all;" ::: "memory");  // bias, shares
  __syncthreads();
  auto value = [&](int row, int column) {  // of the product, with its bias
    float sum = 0;
#pragma unroll
    for (int k = 0; k < kWarps; k++) sum += sums[k][row * kColumns + column];
    return sum * kBack + __bfloat162float(bias[column / 32 * 32 + bias_at(column % 32)]);
  };
  constexpr int kOutputs = GATE_UP ? kColumns / 2 : kColumns;
  for (int i = threadIdx.x; i < count * kOutputs; i += WARPS * 32) {
    const int row = i / kOutputs, column = i % kOutputs, n = blockIdx.x * kOutputs + column;
    if (n >= (GATE_UP ? o.n / 2 : o.n)) continue;
    const int at = mine[row];
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
