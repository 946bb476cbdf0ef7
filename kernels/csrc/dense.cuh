// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the vLLM project
//
// out[rows][n] = x[rows][k] * W[n][k]^T + bias + residual for one to 16 rows. A row's result does not
// depend on the other rows, nor on how many there are.
#pragma once
#include "mx.cuh"

namespace dense {

// Weights lie in tiles of 16 n x 64 k, the tiles of 16 n in a run. Of a tile's words a lane has 4 of each
// 128, and 2 of a rest of 64: weights g and g + 8 at k = 8q ... 8q + 7 and 32 more.

// Scales of a weight's row in a tile, each for as many k: first those of weight g, then those of g + 8.
template <int SCALES> struct Scaled {
  static constexpr bool kTiled = true;
  static constexpr bool kScaled = true;  // sums are, not weights
  static constexpr bool kFactor = false;  // of the whole weight
  static constexpr int kScales = SCALES;

  __host__ __device__ static size_t scale_of(int n, int group, int tiles) {
    const int g = n % 8, r = n % 16 / 8;
    return ((((size_t)(n / 16) * tiles + group / SCALES) * 8 + g) * 2 + r) * SCALES + group % SCALES;
  }
};

// An E8M0 scale for 32 k.
struct E8m0 : Scaled<2> {
  static constexpr int kScaleWords = 1;

  __device__ static unsigned of(unsigned scales, int r, int i) { return (scales >> (16 * r + 8 * i)) & 255; }
  __device__ static float raised(const unsigned (&scales)[1], int r, int i) { return scale(of(scales[0], r, i)); }
  __device__ static float factor(const unsigned (&scales)[1], int r, int i) {
    const unsigned e8m0 = of(scales[0], r, i);
    return __uint_as_float(e8m0 ? e8m0 << 23 : 1u << 22);
  }
};

// A BF16 scale for 64 or 32 k, zero or normal.
template <int SCALES> struct Bf16Scale : Scaled<SCALES> {
  static constexpr int kScaleWords = SCALES;

  __device__ static float factor(const unsigned (&scales)[SCALES], int r, int i) {
    const int at = r * SCALES + i;
    return __uint_as_float(at % 2 ? scales[at / 2] & 0xffff0000u : scales[at / 2] << 16);
  }
  // Zero becomes 2^-63: all its weights are zero.
  __device__ static float raised(const unsigned (&scales)[SCALES], int r, int i) {
    return __uint_as_float(__float_as_uint(factor(scales, r, i)) + (64u << 23));
  }
};

// E2M1. A lane's 32-bit word 2h + r is weight g + 8r at k = 32h + 8q ... + 7. In a word, pair j of these
// (2j in the low half, 2j + 1 in the high half) has its sign, exponent and mantissa at these bits:
__host__ __device__ constexpr int sign_bit(int j) { return j == 3 ? 14 : 15 - 3 * j; }
__host__ __device__ constexpr int exponent_bit(int j) { return j == 3 ? 10 : 7 - 3 * j; }
__host__ __device__ constexpr int mantissa_bit(int j) { return j == 3 ? 13 : 6 - 3 * j; }

struct Mxfp4 : E8m0 {
  static constexpr int kWords = 4;  // of a lane in a tile
  static constexpr float kBack = ::kBack;

  // Put the code of weight (n, k) into the words of all tiles, which are zero at first.
  __host__ __device__ static void put(unsigned* words, unsigned code, int n, int k, int tiles) {
    const int g = n % 8, r = n % 16 / 8, h = k % 64 / 32, q = k % 32 / 8, j = k % 8 / 2;
    const unsigned bits = ((code >> 3) << sign_bit(j)) | (((code >> 1) & 3u) << exponent_bit(j)) |
                          ((code & 1u) << mantissa_bit(j));
    words[(((size_t)(n / 16) * tiles + k / 64) * 32 + g * 4 + q) * 4 + 2 * h + r] |=
        bits << (16 * (k % 2));
  }

  __host__ __device__ static void pairs(unsigned w, unsigned (&v)[4]) {
    constexpr unsigned kMask = 0x81c081c0u;
    v[0] = w & kMask;
    v[1] = (w << 3) & kMask;
    v[2] = (w << 6) & kMask;
    v[3] = ((w << 1) & 0x80008000u) | ((w >> 3) & 0x01800180u) | ((w >> 7) & 0x00400040u);
  }
  __host__ __device__ static void half(const unsigned (&v)[4], int h, unsigned (&low)[4], unsigned (&high)[4]) {
    pairs(v[2 * h], low);
    pairs(v[2 * h + 1], high);
  }
};

// E2M1 with an E4M3 scale for 16 k, from 2^-6, and an FP32 factor for the whole weight. A product of both has six
// bits, so weights are multiplied, not sums, and rows need not go up. All of a lane's k in half a tile have one scale:
// of the lanes 2p and 2p + 1 a word has those of (g, 16 k) (g + 8, 16 k) (g, 16 of the next 32) (g + 8, the same).
struct Nvfp4 {
  static constexpr bool kTiled = true, kScaled = false, kFactor = true;
  static constexpr int kWords = 4, kScaleWords = 1;
  static constexpr int kScales = 4;
  static constexpr float kBack = 4194304.f;  // 126 - 104 = 22

  __host__ __device__ static size_t scale_of(int n, int group, int tiles) {  // a byte
    const int g = n % 8, r = n % 16 / 8, h = group % 4 / 2;
    return ((((size_t)(n / 16) * tiles + group / 4) * 8 + g) * 2 + group % 2) * 4 + 2 * h + r;
  }
  __host__ __device__ static void put(unsigned* words, unsigned code, int n, int k, int tiles) {
    Mxfp4::put(words, code, n, k, tiles);
  }
  __host__ __device__ static void half(const unsigned (&v)[4], int h, unsigned (&low)[4], unsigned (&high)[4]) {
    Mxfp4::half(v, h, low, high);
  }
  // Two scales of weight g + 8r as BF16, times 2^104: BF16's exponent is E4M3's plus 224 - 104.
  __host__ __device__ static unsigned two(unsigned scales, int r) {
    return ((r ? scales >> 4 : scales << 4) & 0x07f007f0u) | 0x70007000u;
  }
  __device__ static void multiply(unsigned scales, int h, unsigned (&low)[4], unsigned (&high)[4]) {
    const unsigned own = h ? 0x3232 : 0x1010;
    const unsigned of_low = __byte_perm(two(scales, 0), 0, own), of_high = __byte_perm(two(scales, 1), 0, own);
#pragma unroll
    for (int j = 0; j < 4; j++) low[j] = product(low[j], of_low), high[j] = product(high[j], of_high);
  }
};

// E4M3. Word 4h + 2r + c is weight g + 8r at k = 32h + 8q + 4c ... + 3, its bytes k 0, 2, 1, 3 of these.
struct Mxfp8 : E8m0 {
  static constexpr int kWords = 8;
  static constexpr float kBack = 256.f;  // 120 - 48 - 64 = 8

  __host__ __device__ static void put(unsigned* words, unsigned code, int n, int k, int tiles) {
    const int g = n % 8, r = n % 16 / 8, h = k % 64 / 32, q = k % 32 / 8, c = k % 8 / 4, i = k % 4;
    const int byte = i % 2 * 2 + i / 2;
    words[((((size_t)(n / 16) * tiles + k / 64) * 2 + h) * 32 + g * 4 + q) * 4 + 2 * r + c] |=
        code << (8 * byte);
  }

  __host__ __device__ static void pairs(unsigned w, unsigned& first, unsigned& second) {
    first = ((w << 8) & 0x80008000u) | ((w << 4) & 0x07f007f0u);
    second = (w & 0x80008000u) | ((w >> 4) & 0x07f007f0u);
  }
  __host__ __device__ static void half(const unsigned (&v)[8], int h, unsigned (&low)[4], unsigned (&high)[4]) {
    pairs(v[4 * h], low[0], low[1]);
    pairs(v[4 * h + 1], low[2], low[3]);
    pairs(v[4 * h + 2], high[0], high[1]);
    pairs(v[4 * h + 3], high[2], high[3]);
  }
};

// INT8, signs and magnitudes, in the order of E4M3. The magnitude is a BF16's mantissa: a subnormal, m * 2^-133.
// Of two bytes in half a word each has the other's sign: one pair needs a mask, the other has its bytes swapped.
struct Int8 : Bf16Scale<1> {
  static constexpr int kWords = 8;
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
  __host__ __device__ static void half(const unsigned (&v)[8], int h, unsigned (&low)[4], unsigned (&high)[4]) {
    pairs(v[4 * h], low[0], low[1]);
    pairs(v[4 * h + 1], low[2], low[3]);
    pairs(v[4 * h + 2], high[0], high[1]);
    pairs(v[4 * h + 3], high[2], high[3]);
  }
};

// INT6 likewise, so a pair has 12 bits: 15 and 0 ... 4 of both halves. Turned in their word, two pairs leave the bits
// 5 ... 8 of both halves free. Words 2h, 2h + 1 and 4 + h have pairs 2i and, turned by 6, 2i + 1 of half h, those of
// weight g first. The seventh and eighth pair have 8 bits in the first and second of these words, turned by 10, and
// the two highest of both magnitudes in the third.
struct Int6 : Bf16Scale<2> {
  static constexpr int kWords = 6;
  static constexpr float kBack = 2097152.f;
  static constexpr unsigned kPair = 0x801f801fu, kLow = 0x80078007u, kHigh = 0x00180018u;

  __host__ __device__ static unsigned turned(unsigned w, int bits) { return w << bits | w >> (32 - bits); }

  __host__ __device__ static void put(unsigned* words, unsigned code, int n, int k, int tiles) {  // sign: bit 5
    const int lane = n % 8 * 4 + k % 32 / 8, h = k % 64 / 32, p = n % 16 / 8 * 4 + k % 8 / 2;
    const unsigned pair = ((code & 31) | (code >> 5) << 15) << (16 * (k % 2));
    unsigned* tile = words + ((size_t)(n / 16) * tiles + k / 64) * 32 * kWords;
    unsigned *two = tile + 4 * lane + 2 * h, *third = tile + 128 + 2 * lane + h;
    if (p < 6) {
      (p < 4 ? two[p / 2] : *third) |= p % 2 ? turned(pair, 26) : pair;
    } else {
      two[p - 6] |= turned(pair & kLow, 22);
      *third |= (pair & kHigh) << (2 * p - 10);
    }
  }

  __host__ __device__ static void half(const unsigned (&v)[6], int h, unsigned (&low)[4], unsigned (&high)[4]) {
    const unsigned a = v[2 * h], b = v[2 * h + 1], c = v[4 + h];
    low[0] = a & kPair, low[1] = turned(a, 6) & kPair;
    low[2] = b & kPair, low[3] = turned(b, 6) & kPair;
    high[0] = c & kPair, high[1] = turned(c, 6) & kPair;
    high[2] = (turned(a, 10) & kLow) | ((c >> 2) & kHigh);
    high[3] = (turned(b, 10) & kLow) | ((c >> 4) & kHigh);
  }
};

// BF16 in 12 bits, bit for bit. Words 4h + 2r + c have signs and mantissas, in INT8's order but for the signs. Word
// 8 + 2h + r has exponents of four bits, those of weight g + 8r at a lane's k of half h. An exponent is counted from
// that of the tile, e, so that `mma` gets a BF16 with the exponents 0 ... 15. The tile's scale, a byte, is e + 15: sums
// are multiplied by 2^(e - 112). What a tile cannot hold is zero there, and in a list. 1,537 bytes a tile.
struct Lossless : Scaled<1> {
  static constexpr int kWords = 12;
  static constexpr int kScaleWords = 1;
  static constexpr float kBack = 18446744073709551616.f;  // 112 - 48 = 64
  static constexpr unsigned kOfFirst = 0x807f807fu;       // sign and mantissa of the first pair of a word

  // Put sign, exponent and mantissa (1, 4, 7 bits) of weight (n, k) into the words of all tiles, which are zero
  // at first.
  __host__ __device__ static void put(unsigned* words, unsigned code, int n, int k, int tiles) {
    const int lane = n % 8 * 4 + k % 32 / 8, r = n % 16 / 8, h = k % 64 / 32, c = k % 8 / 4, i = k % 4;
    unsigned* tile = words + ((size_t)(n / 16) * tiles + k / 64) * 32 * kWords;
    const int at = i / 2 * 8 + i % 2 * 16;  // of the mantissa
    tile[(32 * h + lane) * 4 + 2 * r + c] |= (code & 127) << at | (code >> 11) << (at + 15) % 32;
    tile[(64 + lane) * 4 + 2 * h + r] |= Int6::turned((code >> 7) & 15, (7 + at - 4 * c) % 32);
  }

  // The pairs of k 4c ... + 1 and + 2 ... + 3 of a word and the exponents that begin at its bits 7, 23, 15 and 31
  // (then comes bit 0).
  __host__ __device__ static void pairs(unsigned w, unsigned exponents, unsigned& first, unsigned& second) {
    exponents &= 0x87878787u;
    first = (w & kOfFirst) | (exponents & ~kOfFirst);
    second = Int6::turned((w & ~kOfFirst) | (exponents & kOfFirst), 24);
  }
  __host__ __device__ static void eight(unsigned a, unsigned b, unsigned exponents, unsigned (&v)[4]) {
    pairs(a, exponents, v[0], v[1]);
    pairs(b, Int6::turned(exponents, 4), v[2], v[3]);
  }
  __host__ __device__ static void half(const unsigned (&v)[12], int h, unsigned (&low)[4], unsigned (&high)[4]) {
    eight(v[4 * h], v[4 * h + 1], v[8 + 2 * h], low);
    eight(v[4 * h + 2], v[4 * h + 3], v[9 + 2 * h], high);
  }
  __device__ static float raised(const unsigned (&scales)[1], int, int) { return __uint_as_float(scales[0] << 23); }
};

// Whether there is such a list.
template <class FORMAT> constexpr bool kListed = false;
template <> constexpr bool kListed<Lossless> = true;

// BF16, without scales, in rows as everything else has them: weights g and g + 8 are two rows.
struct Bf16 {
  static constexpr int kWords = 16;
  static constexpr int kScaleWords = 1;
  static constexpr bool kTiled = false, kScaled = false, kFactor = false;
  static constexpr float kBack = 1.f;

  __device__ static void half(const unsigned (&v)[16], int h, unsigned (&low)[4], unsigned (&high)[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) low[j] = v[8 * h + j], high[j] = v[8 * h + 4 + j];
  }
};

struct Operands {
  const bf16* x;           // [rows][64 * tiles]
  const uint4* weights;    // tiles, n rounded up to 16; BF16: [n][64 * tiles]
  const unsigned* scales;  // 8 or 16 words a tile; lossless: a byte; BF16: null
  const bf16* bias;        // [n], or null
  const bf16* residual;    // [rows][n], or null
  bf16* out;               // [rows][n]
  int n, tiles, rows;
  const float* factor;  // NVFP4: of the whole weight
  const int* listed;    // lossless: see `Listed`
};

// The weights of one n that no tile holds. Place n of the list, n + 1 of them, says how far from it they begin;
// those of n + 1 follow. Each is its k (16 bits) and the BF16.
template <int FEW> struct Listed {
  const int* list;
  int next, end;
  unsigned few[FEW];

  __device__ __forceinline__ Listed(const int* list, int n, bool there) : list(list), next(0), end(0) {
    if (there) next = n + list[n], end = n + 1 + list[n + 1];
  }
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int j = 0; j < FEW; j++) few[j] = next + j < end ? list[next + j] : 0;
  }
  // Add products with some rows, of which x(row, k) is an element. The few have been loaded.
  template <int ROWS, class X> __device__ __forceinline__ void add(float (&sums)[ROWS], const X& x) {
    for (; next < end; next += FEW, load()) {
      float values[FEW][ROWS];
#pragma unroll
      for (int j = 0; j < FEW; j++)
#pragma unroll
        for (int row = 0; row < ROWS; row++) values[j][row] = x(row, few[j] >> 16);
#pragma unroll
      for (int j = 0; j < FEW; j++)
#pragma unroll
        for (int row = 0; row < ROWS; row++)
          if (next + j < end) sums[row] = fmaf(__uint_as_float(few[j] << 16), values[j][row], sums[row]);
    }
  }
};

template <class FORMAT> struct Tile {  // of one lane
  unsigned weights[FORMAT::kWords], scales[FORMAT::kScaleWords];

  // Pairs of half a tile, with scales that are not of sums.
  __device__ __forceinline__ void half(int h, unsigned (&low)[4], unsigned (&high)[4]) const {
    FORMAT::half(weights, h, low, high);
    if constexpr (FORMAT::kTiled && !FORMAT::kScaled) FORMAT::multiply(scales[0], h, low, high);
  }

  template <int GROUPS>  // of eight rows
  __device__ __forceinline__ void multiply(const uint4 (&x)[GROUPS][2], float (&acc)[GROUPS][4]) const {
    float sums[GROUPS][4] = {};
#pragma unroll
    for (int h = 0; h < 2; h++) {
      unsigned low[4], high[4];
      half(h, low, high);
#pragma unroll
      for (int group = 0; group < GROUPS; group++) {
        float(&d)[4] = FORMAT::kScaled ? sums[group] : acc[group];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const uint4 both = x[group][h];
          mma(d, low[2 * i], high[2 * i], low[2 * i + 1], high[2 * i + 1], i ? both.z : both.x, i ? both.w : both.y);
          if constexpr (FORMAT::kScaled) {
            const int done = (2 * h + i + 1) * FORMAT::kScales;  // of a scale's k, in quarters
            if (done % 4) continue;  // the next 16 k have the same scales
            const int at = done / 4 - 1;
            add_scaled(acc[group], d, FORMAT::raised(scales, 0, at), FORMAT::raised(scales, 1, at));
            d[0] = d[1] = d[2] = d[3] = 0;
          }
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
  // words of scales for a g of a tile; NVFP4: of two pairs of lanes
  static constexpr int kStride = FORMAT::kFactor ? 2 * FORMAT::kScaleWords : FORMAT::kScaleWords;
  const uint4 *low, *high;
  const unsigned* scales;

  __device__ __forceinline__ Lane(const Operands& o, int block, int lane) {
    const int g = lane / 4, q = lane % 4;
    if constexpr (FORMAT::kTiled) {
      const uint4* tiles = o.weights + (size_t)block * o.tiles * 8 * FORMAT::kWords;
      low = tiles + lane;
      high = nullptr;
      if constexpr (FORMAT::kWords % 4)
        high = reinterpret_cast<const uint4*>(reinterpret_cast<const uint2*>(tiles + 8 * (FORMAT::kWords - 2)) + lane);
      scales = o.scales + ((size_t)block * o.tiles * 8 + g) * kStride + (kStride > FORMAT::kScaleWords ? q / 2 : 0);
    } else {
      low = o.weights + (size_t)min(block * 16 + g, o.n - 1) * o.tiles * 8 + q;
      high = o.weights + (size_t)min(block * 16 + g + 8, o.n - 1) * o.tiles * 8 + q;
      scales = nullptr;
    }
  }

  __device__ __forceinline__ void load(Tile<FORMAT>& v, int tile) const {
    auto four = [&](int at, const uint4* from) {
      const uint4 w = __ldcs(from);
      v.weights[at] = w.x, v.weights[at + 1] = w.y, v.weights[at + 2] = w.z, v.weights[at + 3] = w.w;
    };
    if constexpr (FORMAT::kTiled) {
      const size_t first = (size_t)tile * 8 * FORMAT::kWords;
#pragma unroll
      for (int i = 0; i < FORMAT::kWords / 4; i++) four(4 * i, low + first + 32 * i);
      if constexpr (FORMAT::kWords % 4) {
        const uint2 w = __ldcs(reinterpret_cast<const uint2*>(high + first));
        v.weights[FORMAT::kWords - 2] = w.x, v.weights[FORMAT::kWords - 1] = w.y;
      }
      if constexpr (FORMAT::kScaleWords == 1) {
        v.scales[0] = __ldcs(scales + (size_t)tile * 8 * kStride);
      } else {
        const uint2 s = __ldcs(reinterpret_cast<const uint2*>(scales + (size_t)tile * 16));
        v.scales[0] = s.x, v.scales[1] = s.y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++) four(4 * i, (i % 2 ? high : low) + tile * 8 + i / 2 * 4);
    }
  }
};

// A number in place of two addresses: the third quarter of the words needs their registers.
template <> struct Lane<Lossless> {
  const uint4* weights;
  const unsigned char* scales;
  int first, lane;

  __device__ __forceinline__ Lane(const Operands& o, int block, int lane)
      : weights(o.weights), scales((const unsigned char*)o.scales), first(block * o.tiles), lane(lane) {}

  __device__ __forceinline__ void load(Tile<Lossless>& v, int tile) const {
#pragma unroll
    for (int i = 0; i < 3; i++) {
      const uint4 w = __ldcs(weights + ((size_t)(first + tile) * 3 + i) * 32 + lane);
      v.weights[4 * i] = w.x, v.weights[4 * i + 1] = w.y, v.weights[4 * i + 2] = w.z, v.weights[4 * i + 3] = w.w;
    }
    v.scales[0] = __ldg(scales + first + tile);
  }
};

__device__ __forceinline__ float bias_of(const Operands& o, int n) {
  return o.bias && n < o.n ? __bfloat162float(o.bias[n]) : 0;
}

template <class FORMAT> __device__ __forceinline__ float factor_of(const float* factor) {
  return FORMAT::kFactor ? *factor : 1.f;
}

template <class FORMAT>
__device__ __forceinline__ void finish(const Operands& o, int row, int n, float sum, float factor, float bias) {
  if (row >= o.rows || n >= o.n) return;
  sum = sum * FORMAT::kBack * factor + bias;
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
  const float bias = bias_of(o, n), factor = factor_of<FORMAT>(o.factor);  // early, like the weights
  Listed<2> listed(o.listed, n, kListed<FORMAT> && n < o.n && threadIdx.x < o.rows * 16);
  listed.load();
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
    static_assert(WARPS * 32 >= ROWS * 16, "the list is read in the first turn alone");
    float more[1] = {bias};
    if constexpr (kListed<FORMAT>)
      listed.add(more, [&](int, int k) { return __bfloat162float(o.x[(size_t)(i / 16) * o.tiles * 64 + k]); });
    finish<FORMAT>(o, i / 16, n, sum, factor, more[0]);
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
  const float factor = factor_of<FORMAT>(o.factor);
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
      for (int r = 0; r < 2; r++) {
        const int n = block * 16 + g + 8 * r;
        float more[2 * kGroups];
#pragma unroll
        for (int i = 0; i < 2 * kGroups; i++) more[i] = bias_of(o, n);
        if constexpr (kListed<FORMAT>) {
          Listed<1> listed(o.listed, n, n < o.n);
          listed.load();
          listed.add(more, [&](int i, int k) {
            return __bfloat162float(shared[(8 * (i / 2) + 2 * q + i % 2) * pitch + k]) * kDown;
          });
        }
#pragma unroll
        for (int i = 0; i < 2 * kGroups; i++) {
          float& sum = acc[i / 2][2 * r + i % 2];
          finish<FORMAT>(o, 8 * (i / 2) + 2 * q + i % 2, n, sum, factor, more[i]);
          sum = 0;
        }
      }
      tile = 0;
      block += step;
    }
  }
}

// Tiles as BF16 in rows, for products that another kernel does better.
struct Expanded {
  const uint4* weights;
  const unsigned* scales;
  bf16* out;  // [n][64 * tiles]
  int n, tiles;
  const float* factor;
  const int* listed;
};

template <class FORMAT> __device__ __forceinline__ void expand(const Expanded& o) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const Operands operands{nullptr, o.weights, o.scales, nullptr, nullptr, nullptr, o.n, o.tiles};
  const Lane<FORMAT> from(operands, blockIdx.x, lane);
  const float whole = factor_of<FORMAT>(o.factor);
  constexpr float kUnit = FORMAT::kScaled ? 5192296858534827628530496329220096.f : 1.f;  // 2^112, as scales and rows have
  take_turn();
  for (int tile = threadIdx.x / 32; tile < o.tiles; tile += blockDim.x / 32) {
    Tile<FORMAT> v;
    from.load(v, tile);
#pragma unroll
    for (int h = 0; h < 2; h++) {
      unsigned pairs[2][4];
      v.half(h, pairs[0], pairs[1]);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int n = blockIdx.x * 16 + g + 8 * r;
        if (n >= o.n) continue;
        float factor = FORMAT::kBack * whole;
        if constexpr (kListed<FORMAT>)
          factor = FORMAT::raised(v.scales, r, 0);  // 2^(e - 112)
        else if constexpr (FORMAT::kScaled)
          factor *= FORMAT::factor(v.scales, r, h * FORMAT::kScales / 2);
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
  if constexpr (kListed<FORMAT>) {
    __syncthreads();
    const int n = blockIdx.x * 16 + threadIdx.x % 16;
    const Listed<1> listed(o.listed, n, n < o.n);
    for (int i = listed.next + threadIdx.x / 16; i < listed.end; i += blockDim.x / 16)
      o.out[(size_t)n * o.tiles * 64 + ((unsigned)o.listed[i] >> 16)] = __ushort_as_bfloat16(o.listed[i] & 0xffff);
  }
}

}  // namespace dense
