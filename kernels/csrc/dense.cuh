// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// out[rows][n] = x[rows][k] * W[n][k]^T + bias + residual for one to 16 rows. A row's result does not
// depend on the other rows, nor on how many there are.
#pragma once
#include "mx.cuh"

namespace dense {

// E2M1, E4M3 and INT8 lie in tiles of 16 n x 64 k, the tiles of 16 n in a run. A lane has 16 bytes of each 512 of a
// tile: of weights g and g + 8 at k = 8q ... 8q + 7 and 32 more. Word pairs of a tile's k are those of
// `mma`'s operand in that order.

// One E8M0 scale for 32 k: bytes (g, 32 k) (g, next 32) (g + 8, 32 k) (g + 8, next 32) of a tile.
struct E8m0 {
  static constexpr bool kScaled = true;
  static constexpr int kScales = 2;  // of a weight's row in a tile

  __host__ __device__ static size_t scale_of(int n, int group, int tiles) {  // a byte
    const int g = n % 8, r = n % 16 / 8;
    return (((size_t)(n / 16) * tiles + group / 2) * 8 + g) * 4 + 2 * r + group % 2;
  }
  __device__ static unsigned of(unsigned scales, int r, int h) { return (scales >> (16 * r + 8 * h)) & 255; }
  __device__ static float raised(unsigned scales, int r, int h) { return scale(of(scales, r, h)); }
  __device__ static float factor(unsigned scales, int r, int h) {
    const unsigned e8m0 = of(scales, r, h);
    return __uint_as_float(e8m0 ? e8m0 << 23 : 1u << 22);
  }
};

// One BF16 scale for 64 k, zero or normal: (g) (g + 8) of a tile.
struct Bf16Scale {
  static constexpr bool kScaled = true;
  static constexpr int kScales = 1;

  __host__ __device__ static size_t scale_of(int n, int group, int tiles) {  // two bytes
    const int g = n % 8, r = n % 16 / 8;
    return (((size_t)(n / 16) * tiles + group) * 8 + g) * 2 + r;
  }
  __device__ static float factor(unsigned scales, int r, int) {
    return __uint_as_float(r ? scales & 0xffff0000u : scales << 16);
  }
  // Zero becomes 2^-63: all its weights are zero.
  __device__ static float raised(unsigned scales, int r, int h) {
    return __uint_as_float(__float_as_uint(factor(scales, r, h)) + (64u << 23));
  }
};

// E2M1. A lane's 32-bit word 2h + r is weight g + 8r at k = 32h + 8q ... + 7. In a word, pair j of these
// (2j in the low half, 2j + 1 in the high half) has its sign, exponent and mantissa at these bits:
__host__ __device__ constexpr int sign_bit(int j) { return j == 3 ? 14 : 15 - 3 * j; }
__host__ __device__ constexpr int exponent_bit(int j) { return j == 3 ? 10 : 7 - 3 * j; }
__host__ __device__ constexpr int mantissa_bit(int j) { return j == 3 ? 13 : 6 - 3 * j; }

struct Mxfp4 : E8m0 {
  static constexpr int kParts = 1;  // of 512 bytes a tile
  static constexpr float kBack = ::kBack;

  // Put the code of weight (n, k) into the words of all tiles, which are zero at first.
  __host__ __device__ static void put(unsigned* words, unsigned code, int n, int k, int tiles) {
    const int g = n % 8, r = n % 16 / 8, h = k % 64 / 32, q = k % 32 / 8, j = k % 8 / 2;
    const unsigned bits = ((code >> 3) << sign_bit(j)) | (((code >> 1) & 3u) << exponent_bit(j)) |
                          ((code & 1u) << mantissa_bit(j));
    words[(((size_t)(n / 16) * tiles + k / 64) * 32 + g * 4 + q) * 4 + 2 * h + r] |=
        bits << (16 * (k % 2));
  }

  __device__ static void pairs(unsigned w, unsigned (&v)[4]) {
    constexpr unsigned kMask = 0x81c081c0u;
    v[0] = w & kMask;
    v[1] = (w << 3) & kMask;
    v[2] = (w << 6) & kMask;
    v[3] = ((w << 1) & 0x80008000u) | ((w >> 3) & 0x01800180u) | ((w >> 7) & 0x00400040u);
  }
  __device__ static void half(const uint4 (&v)[1], int h, unsigned (&low)[4], unsigned (&high)[4]) {
    pairs(h ? v[0].z : v[0].x, low);
    pairs(h ? v[0].w : v[0].y, high);
  }
};

// E4M3. Part h; word 2r + c is weight g + 8r at k = 32h + 8q + 4c ... + 3, its bytes k 0, 2, 1, 3 of these.
struct Mxfp8 : E8m0 {
  static constexpr int kParts = 2;
  static constexpr float kBack = 256.f;  // 120 - 48 - 64 = 8

  __host__ __device__ static void put(unsigned* words, unsigned code, int n, int k, int tiles) {
    const int g = n % 8, r = n % 16 / 8, h = k % 64 / 32, q = k % 32 / 8, c = k % 8 / 4, i = k % 4;
    const int byte = i % 2 * 2 + i / 2;
    words[((((size_t)(n / 16) * tiles + k / 64) * 2 + h) * 32 + g * 4 + q) * 4 + 2 * r + c] |=
        code << (8 * byte);
  }

  __device__ static void pairs(unsigned w, unsigned& first, unsigned& second) {
    first = ((w << 8) & 0x80008000u) | ((w << 4) & 0x07f007f0u);
    second = (w & 0x80008000u) | ((w >> 4) & 0x07f007f0u);
  }
  __device__ static void half(const uint4 (&v)[2], int h, unsigned (&low)[4], unsigned (&high)[4]) {
    pairs(v[h].x, low[0], low[1]);
    pairs(v[h].y, low[2], low[3]);
    pairs(v[h].z, high[0], high[1]);
    pairs(v[h].w, high[2], high[3]);
  }
};

// INT8, signs and magnitudes, in the order of E4M3. The magnitude is a BF16's mantissa: a subnormal, m * 2^-133.
// Of two bytes in half a word each has the other's sign: one pair needs a mask, the other has its bytes swapped.
struct Int8 : Bf16Scale {
  static constexpr int kParts = 2;
  static constexpr float kBack = 2097152.f;  // 133 - 48 - 64 = 21

  __host__ __device__ static void put(unsigned* words, unsigned code, int n, int k, int tiles) {
    const int sign = k % 4 / 2 ? k - 2 : k + 2;
    Mxfp8::put(words, code & 127, n, k, tiles);
    Mxfp8::put(words, code & 128, n, sign, tiles);
  }

  __host__ __device__ static void pairs(unsigned w, unsigned& first, unsigned& second) {
    first = w & 0x807f807fu;
#ifdef __CUDA_ARCH__
    w = __byte_perm(w, 0, 0x2301);
#else
    w = ((w << 8) & 0xff00ff00u) | ((w >> 8) & 0x00ff00ffu);
#endif
    second = w & 0x807f807fu;
  }
  __device__ static void half(const uint4 (&v)[2], int h, unsigned (&low)[4], unsigned (&high)[4]) {
    pairs(v[h].x, low[0], low[1]);
    pairs(v[h].y, low[2], low[3]);
    pairs(v[h].z, high[0], high[1]);
    pairs(v[h].w, high[2], high[3]);
  }
};

// BF16, without scales, in rows as everything else has them: weights g and g + 8 are two rows.
struct Bf16 {
  static constexpr int kParts = 4;
  static constexpr bool kScaled = false;
  static constexpr float kBack = 1.f;

  __device__ static void half(const uint4 (&v)[4], int h, unsigned (&low)[4], unsigned (&high)[4]) {
    const uint4 a = v[2 * h], b = v[2 * h + 1];
    low[0] = a.x, low[1] = a.y, low[2] = a.z, low[3] = a.w;
    high[0] = b.x, high[1] = b.y, high[2] = b.z, high[3] = b.w;
  }
};

struct Operands {
  const bf16* x;           // [rows][64 * tiles]
  const uint4* weights;    // tiles, n rounded up to 16; BF16: [n][64 * tiles]
  const unsigned* scales;  // 8 words a tile; BF16: null
  const bf16* bias;        // [n], or null
  const bf16* residual;    // [rows][n], or null
  bf16* out;               // [rows][n]
  int n, tiles, rows;
};

template <class FORMAT> struct Tile {  // of one lane
  uint4 weights[FORMAT::kParts];
  unsigned scales;

  template <int GROUPS>  // of eight rows
  __device__ __forceinline__ void multiply(const uint4 (&x)[GROUPS][2], float (&acc)[GROUPS][4]) const {
    float sums[GROUPS][4] = {};
#pragma unroll
    for (int h = 0; h < 2; h++) {
      unsigned low[4], high[4];
      FORMAT::half(weights, h, low, high);
#pragma unroll
      for (int group = 0; group < GROUPS; group++) {
        float(&d)[4] = FORMAT::kScaled ? sums[group] : acc[group];
        mma(d, low[0], high[0], low[1], high[1], x[group][h].x, x[group][h].y);
        mma(d, low[2], high[2], low[3], high[3], x[group][h].z, x[group][h].w);
        if constexpr (FORMAT::kScaled) {
          if (h + FORMAT::kScales < 2) continue;  // the other half has the same scales
          add_scaled(acc[group], d, FORMAT::raised(scales, 0, h), FORMAT::raised(scales, 1, h));
          d[0] = d[1] = d[2] = d[3] = 0;
        }
      }
    }
  }

  // Rows as `multiply` takes them.
  __device__ static __forceinline__ uint4 row(const bf16* x) {
    const uint4 v = *reinterpret_cast<const uint4*>(x);
    return FORMAT::kScaled ? up(v) : v;
  }
};

// Where a lane finds its part of the tiles of 16 weights' rows.
template <class FORMAT> struct Lane {
  const uint4 *low, *high;
  const unsigned* scales;

  __device__ __forceinline__ Lane(const Operands& o, int block, int lane) {
    const int g = lane / 4, q = lane % 4;
    if constexpr (FORMAT::kScaled) {
      low = o.weights + (size_t)block * o.tiles * 32 * FORMAT::kParts + lane;
      high = nullptr;
      scales = o.scales + (size_t)block * o.tiles * 8 + g;
    } else {
      low = o.weights + (size_t)min(block * 16 + g, o.n - 1) * o.tiles * 8 + q;
      high = o.weights + (size_t)min(block * 16 + g + 8, o.n - 1) * o.tiles * 8 + q;
      scales = nullptr;
    }
  }

  __device__ __forceinline__ void load(Tile<FORMAT>& v, int tile) const {
    if constexpr (FORMAT::kScaled) {
#pragma unroll
      for (int i = 0; i < FORMAT::kParts; i++)
        v.weights[i] = __ldcs(low + (size_t)tile * 32 * FORMAT::kParts + 32 * i);
      v.scales = __ldcs(scales + (size_t)tile * 8);
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) v.weights[i] = __ldcs((i % 2 ? high : low) + tile * 8 + i / 2 * 4);
    }
  }
};

__device__ __forceinline__ float bias_of(const Operands& o, int n) {
  return o.bias && n < o.n ? __bfloat162float(o.bias[n]) : 0;
}

template <class FORMAT>
__device__ __forceinline__ void finish(const Operands& o, int row, int n, float sum, float bias) {
  if (row >= o.rows || n >= o.n) return;
  sum = sum * FORMAT::kBack + bias;
  if (o.residual) sum += __bfloat162float(o.residual[(size_t)row * o.n + n]);
  o.out[(size_t)row * o.n + n] = __float2bfloat16(sum);
}

// A block for each 16 weights' rows, whose tiles its warps share; U tiles a warp are in flight before
// the kernel that gives x has ended. For a qkv or o projection.
template <class FORMAT, int WARPS, int U, int ROWS>
__device__ __forceinline__ void narrow(const Operands& o) {
  constexpr int kGroups = ROWS / 8;
  __shared__ float sums[WARPS][ROWS * 16];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const Lane<FORMAT> from(o, blockIdx.x, lane);
  Tile<FORMAT> v[U];
#pragma unroll
  for (int u = 0; u < U; u++)
    if (warp + u * WARPS < o.tiles) from.load(v[u], warp + u * WARPS);
  const int n = blockIdx.x * 16 + threadIdx.x % 16;
  const float bias = bias_of(o, n);  // early, like the weights
  take_turn();
  // A lane without a row gives a column of the product that is left out. It reads nothing; where there
  // are two groups of rows it reads the last row, since loads without a condition are faster.
  const bool reads = kGroups > 1 || g < o.rows;
  const bf16* x_of[kGroups];
#pragma unroll
  for (int i = 0; i < kGroups; i++) x_of[i] = o.x + (size_t)min(8 * i + g, o.rows - 1) * o.tiles * 64 + 8 * q;
  float acc[kGroups][4] = {};
  for (int first = warp; first < o.tiles; first += U * WARPS) {
#pragma unroll
    for (int u = 0; u < U; u++) {
      const int tile = first + u * WARPS, next = tile + U * WARPS;
      if (tile >= o.tiles) break;
      uint4 x[kGroups][2];
#pragma unroll
      for (int i = 0; i < kGroups; i++)
#pragma unroll
        for (int h = 0; h < 2; h++)
          x[i][h] = reads ? Tile<FORMAT>::row(x_of[i] + tile * 64 + 32 * h) : make_uint4(0, 0, 0, 0);
      v[u].multiply(x, acc);
      if (next < o.tiles) from.load(v[u], next);
    }
  }
#pragma unroll
  for (int group = 0; group < kGroups; group++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      sums[warp][(8 * group + 2 * q + i % 2) * 16 + g + i / 2 * 8] = acc[group][i];
  __syncthreads();
  for (int i = threadIdx.x; i < o.rows * 16; i += WARPS * 32) {
    float sum = 0;
#pragma unroll
    for (int k = 0; k < WARPS; k++) sum += sums[k][i];
    finish<FORMAT>(o, i / 16, n, sum, bias);
  }
}

// Each warp takes 16 weights' rows after another, and loads U tiles ahead across their ends. For
// lm_head, whose rows are many. Shared memory: ROWS * (64 * tiles + 32) * 2 bytes.
template <class FORMAT, int WARPS, int U, int ROWS>
__device__ __forceinline__ void wide(const Operands& o) {
  extern __shared__ __align__(16) bf16 shared[];
  constexpr int kGroups = ROWS / 8;
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, k = o.tiles * 64;
  const int blocks = (o.n + 15) / 16, step = gridDim.x * WARPS;
  const int first = threadIdx.x / 32 * gridDim.x + blockIdx.x;
  Tile<FORMAT> v[U];
  int next_block = first, next_tile = 0;
  Lane<FORMAT> from(o, next_block, lane);
  auto load = [&](int u) {
    if (next_block < blocks) from.load(v[u], next_tile);
    if (++next_tile == o.tiles) {
      next_tile = 0;
      next_block += step;
      from = Lane<FORMAT>(o, next_block, lane);
    }
  };
#pragma unroll
  for (int u = 0; u < U; u++) load(u);
  take_turn();
  const int pitch = k + 32;  // two rows apart, 16-byte reads of eight lanes meet no bank twice
  for (int i = threadIdx.x; i < o.rows * k / 8; i += WARPS * 32) {
    const int row = i / (k / 8), at = i % (k / 8) * 8;
    *reinterpret_cast<uint4*>(shared + row * pitch + at) = Tile<FORMAT>::row(o.x + (size_t)row * k + at);
  }
  __syncthreads();
  const bool reads = kGroups > 1 || g < o.rows;  // as in `narrow`
  const bf16* x_of = shared + g * pitch + 8 * q;
  float acc[kGroups][4] = {};
  int tile = 0;
  for (int block = first; block < blocks;) {
#pragma unroll
    for (int u = 0; u < U; u++) {
      if (block >= blocks) break;
      uint4 x[kGroups][2];
#pragma unroll
      for (int i = 0; i < kGroups; i++)
#pragma unroll
        for (int h = 0; h < 2; h++)
          x[i][h] = reads ? *reinterpret_cast<const uint4*>(x_of + 8 * i * pitch + tile * 64 + 32 * h)
                          : make_uint4(0, 0, 0, 0);
      const Tile<FORMAT> now = v[u];
      load(u);
      now.multiply(x, acc);
      if (++tile < o.tiles) continue;
#pragma unroll
      for (int group = 0; group < kGroups; group++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int n = block * 16 + g + i / 2 * 8;
          finish<FORMAT>(o, 8 * group + 2 * q + i % 2, n, acc[group][i], bias_of(o, n));
          acc[group][i] = 0;
        }
      tile = 0;
      block += step;
    }
  }
}

// Tiles as BF16 in rows, for products that another kernel does better: weight n of 16, eight k a lane.
struct Expanded {
  const uint4* weights;
  const unsigned* scales;
  bf16* out;  // [n][64 * tiles]
  int n, tiles;
};

template <class FORMAT> __device__ __forceinline__ void expand(const Expanded& o) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const Operands operands{nullptr, o.weights, o.scales, nullptr, nullptr, nullptr, o.n, o.tiles, 0};
  const Lane<FORMAT> from(operands, blockIdx.x, lane);
  constexpr float kUnit = 5192296858534827628530496329220096.f;  // 2^112, as scales and rows have
  take_turn();
  for (int tile = threadIdx.x / 32; tile < o.tiles; tile += blockDim.x / 32) {
    Tile<FORMAT> v;
    from.load(v, tile);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      unsigned pairs[2][4];
      FORMAT::half(v.weights, h, pairs[0], pairs[1]);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int n = blockIdx.x * 16 + g + 8 * r;
        if (n >= o.n) continue;
        const float factor = FORMAT::factor(v.scales, r, h) * FORMAT::kBack;
        unsigned words[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float first = __uint_as_float(pairs[r][j] << 16) * kUnit;
          const float second = __uint_as_float(pairs[r][j] & 0xffff0000u) * kUnit;
          const __nv_bfloat162 both = __floats2bfloat162_rn(first * factor, second * factor);
          words[j] = *reinterpret_cast<const unsigned*>(&both);
        }
        *reinterpret_cast<uint4*>(o.out + ((size_t)n * o.tiles + tile) * 64 + 32 * h + 8 * q) =
            make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

}  // namespace dense
