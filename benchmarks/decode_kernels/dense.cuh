// out[ROWS][n] = x[ROWS][k] * W[n][k]^T + bias + residual for one to eight rows. A row's result does
// not depend on the other rows, nor on how many there are.
#pragma once
#include "mx.cuh"

namespace dense {

// Weights lie in tiles of 16 n x 64 k, 512 bytes, the tiles of 16 n in a run. A lane has 16 bytes of a
// tile; their 32-bit word 2h + r is weight g + 8r at k = 32h + 8q ... + 7. In a word, pair j of these
// (2j in the low half, 2j + 1 in the high half) has its sign, exponent and mantissa at these bits:
__host__ __device__ constexpr int sign_bit(int j) { return j == 3 ? 14 : 15 - 3 * j; }
__host__ __device__ constexpr int exponent_bit(int j) { return j == 3 ? 10 : 7 - 3 * j; }
__host__ __device__ constexpr int mantissa_bit(int j) { return j == 3 ? 13 : 6 - 3 * j; }

__host__ __device__ inline unsigned spread(unsigned e2m1, int k) {
  const int j = k % 8 / 2;
  const unsigned bits = ((e2m1 >> 3) << sign_bit(j)) | (((e2m1 >> 1) & 3u) << exponent_bit(j)) |
                        ((e2m1 & 1u) << mantissa_bit(j));
  return bits << (16 * (k % 2));
}

__host__ __device__ inline size_t word_of(int n, int k, int tiles) {
  const int g = n % 8, r = n % 16 / 8, h = k % 64 / 32, q = k % 32 / 8;
  return (((size_t)(n / 16) * tiles + k / 64) * 32 + g * 4 + q) * 4 + 2 * h + r;
}

__host__ __device__ inline size_t scale_of(int n, int group, int tiles) {  // a byte
  const int g = n % 8, r = n % 16 / 8;
  return (((size_t)(n / 16) * tiles + group / 2) * 8 + g) * 4 + 2 * r + group % 2;
}

__device__ __forceinline__ void pairs(unsigned w, unsigned (&v)[4]) {
  constexpr unsigned kMask = 0x81c081c0u;
  v[0] = w & kMask;
  v[1] = (w << 3) & kMask;
  v[2] = (w << 6) & kMask;
  v[3] = ((w << 1) & 0x80008000u) | ((w >> 3) & 0x01800180u) | ((w >> 7) & 0x00400040u);
}

// One tile: scales are bytes (g, 32 k) (g, next 32) (g + 8, 32 k) (g + 8, next 32).
__device__ __forceinline__ void multiply(uint4 weights, unsigned scales, const uint4 (&x)[2],
                                         float (&acc)[4]) {
  const unsigned w[4] = {weights.x, weights.y, weights.z, weights.w};
#pragma unroll
  for (int h = 0; h < 2; h++) {
    unsigned low[4], high[4];
    pairs(w[2 * h], low);
    pairs(w[2 * h + 1], high);
    float d[4] = {};
    mma(d, low[0], high[0], low[1], high[1], x[h].x, x[h].y);
    mma(d, low[2], high[2], low[3], high[3], x[h].z, x[h].w);
    add_scaled(acc, d, scale((scales >> (8 * h)) & 255), scale((scales >> (16 + 8 * h)) & 255));
  }
}

struct Operands {
  const bf16* x;           // [ROWS][64 * tiles]
  const uint4* weights;    // tiles, see above; n rounded up to 16
  const unsigned* scales;  // 8 words a tile
  const bf16* bias;        // [n], or null
  const bf16* residual;    // [ROWS][n], or null
  bf16* out;               // [ROWS][n]
  int n, tiles;
};

__device__ __forceinline__ void finish(const Operands& o, int row, int n, float sum) {
  if (n >= o.n) return;
  sum *= kBack;
  if (o.bias) sum += __bfloat162float(o.bias[n]);
  if (o.residual) sum += __bfloat162float(o.residual[(size_t)row * o.n + n]);
  o.out[(size_t)row * o.n + n] = __float2bfloat16(sum);
}

// A block for each 16 weights' rows, whose tiles its warps share; U tiles a warp are in flight before
// the kernel that gives x has ended. For a qkv or o projection.
template <int WARPS, int U, int ROWS>
__global__ void __launch_bounds__(WARPS * 32) narrow(Operands o) {
  __shared__ float sums[WARPS][128];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const uint4* w = o.weights + (size_t)blockIdx.x * o.tiles * 32 + lane;
  const unsigned* s = o.scales + (size_t)blockIdx.x * o.tiles * 8 + g;
  uint4 v[U];
  unsigned z[U];
  auto load = [&](int u, int tile) {
    const bool there = tile < o.tiles;
    v[u] = there ? __ldcs(w + (size_t)tile * 32) : make_uint4(0, 0, 0, 0);
    z[u] = there ? __ldcs(s + (size_t)tile * 8) : 0;
  };
#pragma unroll
  for (int u = 0; u < U; u++) load(u, warp + u * WARPS);
  take_turn();
  const bf16* x = o.x + (size_t)min(g, ROWS - 1) * o.tiles * 64 + 8 * q;
  float acc[4] = {};
  for (int first = warp; first < o.tiles; first += U * WARPS) {
#pragma unroll
    for (int u = 0; u < U; u++) {
      const int tile = first + u * WARPS;
      if (tile >= o.tiles) break;
      uint4 row[2];
#pragma unroll
      for (int h = 0; h < 2; h++)
        row[h] = g < ROWS ? up(*reinterpret_cast<const uint4*>(x + tile * 64 + 32 * h))
                          : make_uint4(0, 0, 0, 0);
      multiply(v[u], z[u], row, acc);
      load(u, tile + U * WARPS);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; i++) sums[warp][(2 * q + i % 2) * 16 + g + i / 2 * 8] = acc[i];
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * 16; i += WARPS * 32) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < WARPS; k++) sum += sums[k][i];
    finish(o, i / 16, blockIdx.x * 16 + i % 16, sum);
  }
}

// Each warp takes 16 weights' rows after another, and loads U tiles ahead across their ends. For
// lm_head, whose rows are many. Shared memory: ROWS * (64 * tiles + 32) * 2 bytes.
template <int WARPS, int U, int ROWS>
__global__ void __launch_bounds__(WARPS * 32) wide(Operands o) {
  extern __shared__ __align__(16) bf16 shared[];
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, k = o.tiles * 64;
  const int blocks = (o.n + 15) / 16, step = gridDim.x * WARPS;
  const int first = threadIdx.x / 32 * gridDim.x + blockIdx.x;
  const uint4* w = o.weights + (size_t)first * o.tiles * 32 + lane;
  const unsigned* s = o.scales + (size_t)first * o.tiles * 8 + g;
  uint4 v[U];
  unsigned z[U];
  int next_block = first, next_tile = 0;
  auto load = [&](int u) {
    if (next_block < blocks) {
      v[u] = __ldcs(w);
      z[u] = __ldcs(s);
    }
    w += 32;
    s += 8;
    if (++next_tile == o.tiles) {
      next_tile = 0;
      next_block += step;
      w += (size_t)(step - 1) * o.tiles * 32;
      s += (size_t)(step - 1) * o.tiles * 8;
    }
  };
#pragma unroll
  for (int u = 0; u < U; u++) load(u);
  take_turn();
  const int pitch = k + 32;  // two rows apart, 16-byte reads of eight lanes meet no bank twice
  for (int i = threadIdx.x; i < ROWS * k / 8; i += WARPS * 32) {
    const int row = i / (k / 8), at = i % (k / 8) * 8;
    *reinterpret_cast<uint4*>(shared + row * pitch + at) =
        up(*reinterpret_cast<const uint4*>(o.x + (size_t)row * k + at));
  }
  __syncthreads();
  const bf16* x = shared + min(g, ROWS - 1) * pitch + 8 * q;
  float acc[4] = {};
  int tile = 0;
  for (int block = first; block < blocks;) {
#pragma unroll
    for (int u = 0; u < U; u++) {
      if (block >= blocks) break;
      uint4 row[2];
#pragma unroll
      for (int h = 0; h < 2; h++)
        row[h] = g < ROWS ? *reinterpret_cast<const uint4*>(x + tile * 64 + 32 * h)
                          : make_uint4(0, 0, 0, 0);
      const uint4 weights = v[u];
      const unsigned scales = z[u];
      load(u);
      multiply(weights, scales, row, acc);
      if (++tile < o.tiles) continue;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (2 * q + i % 2 < ROWS) finish(o, 2 * q + i % 2, block * 16 + g + i / 2 * 8, acc[i]);
        acc[i] = 0;
      }
      tile = 0;
      block += step;
    }
  }
}

}  // namespace dense
