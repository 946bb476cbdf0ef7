// out[ROWS][n] = x[ROWS][k] * W[n][k]^T + bias + residual for one to eight rows. A row's result does
// not depend on the other rows, nor on how many there are.
#pragma once
#include "mx.cuh"

namespace dense {

// Weights lie in tiles of 16 n x 64 k, the tiles of 16 n in a run. A lane has 16 bytes of each 512 of a
// tile: of weights g and g + 8 at k = 8q ... 8q + 7 and 32 more. Word pairs of a tile's k are those of
// `mma`'s operand in that order.

// E2M1. A lane's 32-bit word 2h + r is weight g + 8r at k = 32h + 8q ... + 7. In a word, pair j of these
// (2j in the low half, 2j + 1 in the high half) has its sign, exponent and mantissa at these bits:
__host__ __device__ constexpr int sign_bit(int j) { return j == 3 ? 14 : 15 - 3 * j; }
__host__ __device__ constexpr int exponent_bit(int j) { return j == 3 ? 10 : 7 - 3 * j; }
__host__ __device__ constexpr int mantissa_bit(int j) { return j == 3 ? 13 : 6 - 3 * j; }

struct Mxfp4 {
  static constexpr int kParts = 1;  // of 512 bytes a tile
  static constexpr bool kScaled = true;
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
struct Mxfp8 {
  static constexpr int kParts = 2;
  static constexpr bool kScaled = true;
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

// BF16, without scales. Part 2h + r is weight g + 8r at k = 32h + 8q ... + 7, as it is.
struct Bf16 {
  static constexpr int kParts = 4;
  static constexpr bool kScaled = false;
  static constexpr float kBack = 1.f;

  __host__ __device__ static void put(unsigned* words, unsigned code, int n, int k, int tiles) {
    const int g = n % 8, r = n % 16 / 8, h = k % 64 / 32, q = k % 32 / 8, j = k % 8 / 2;
    words[((((size_t)(n / 16) * tiles + k / 64) * 4 + 2 * h + r) * 32 + g * 4 + q) * 4 + j] |=
        code << (16 * (k % 2));
  }

  __device__ static void half(const uint4 (&v)[4], int h, unsigned (&low)[4], unsigned (&high)[4]) {
    const uint4 a = v[2 * h], b = v[2 * h + 1];
    low[0] = a.x, low[1] = a.y, low[2] = a.z, low[3] = a.w;
    high[0] = b.x, high[1] = b.y, high[2] = b.z, high[3] = b.w;
  }
};

// Scales of a tile: bytes (g, 32 k) (g, next 32) (g + 8, 32 k) (g + 8, next 32).
__host__ __device__ inline size_t scale_of(int n, int group, int tiles) {  // a byte
  const int g = n % 8, r = n % 16 / 8;
  return (((size_t)(n / 16) * tiles + group / 2) * 8 + g) * 4 + 2 * r + group % 2;
}

template <class FORMAT> struct Tile {  // of one lane
  uint4 weights[FORMAT::kParts];
  unsigned scales;

  __device__ __forceinline__ void load(const uint4* w, const unsigned* s) {
#pragma unroll
    for (int i = 0; i < FORMAT::kParts; i++) weights[i] = __ldcs(w + 32 * i);
    if (FORMAT::kScaled) scales = __ldcs(s);
  }

  __device__ __forceinline__ void multiply(const uint4 (&x)[2], float (&acc)[4]) const {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      unsigned low[4], high[4];
      FORMAT::half(weights, h, low, high);
      float sum[4] = {};
      float(&d)[4] = FORMAT::kScaled ? sum : acc;
      mma(d, low[0], high[0], low[1], high[1], x[h].x, x[h].y);
      mma(d, low[2], high[2], low[3], high[3], x[h].z, x[h].w);
      if (FORMAT::kScaled)
        add_scaled(acc, d, scale((scales >> (8 * h)) & 255), scale((scales >> (16 + 8 * h)) & 255));
    }
  }

  // Rows as `multiply` takes them.
  __device__ static __forceinline__ uint4 row(const bf16* x) {
    const uint4 v = *reinterpret_cast<const uint4*>(x);
    return FORMAT::kScaled ? up(v) : v;
  }
};

struct Operands {
  const bf16* x;           // [ROWS][64 * tiles]
  const uint4* weights;    // tiles, see above; n rounded up to 16
  const unsigned* scales;  // 8 words a tile; BF16: null
  const bf16* bias;        // [n], or null
  const bf16* residual;    // [ROWS][n], or null
  bf16* out;               // [ROWS][n]
  int n, tiles;
};

template <class FORMAT>
__device__ __forceinline__ void finish(const Operands& o, int row, int n, float sum) {
  if (n >= o.n) return;
  sum *= FORMAT::kBack;
  if (o.bias) sum += __bfloat162float(o.bias[n]);
  if (o.residual) sum += __bfloat162float(o.residual[(size_t)row * o.n + n]);
  o.out[(size_t)row * o.n + n] = __float2bfloat16(sum);
}

// A block for each 16 weights' rows, whose tiles its warps share; U tiles a warp are in flight before
// the kernel that gives x has ended. For a qkv or o projection.
template <class FORMAT, int WARPS, int U, int ROWS>
__global__ void __launch_bounds__(WARPS * 32) narrow(Operands o) {
  __shared__ float sums[WARPS][128];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  constexpr int kWords = 32 * FORMAT::kParts;  // of 16 bytes, a tile
  const uint4* w = o.weights + (size_t)blockIdx.x * o.tiles * kWords + lane;
  const unsigned* s = o.scales + (size_t)blockIdx.x * o.tiles * 8 + g;
  Tile<FORMAT> v[U];
  auto load = [&](int u, int tile) {
    if (tile < o.tiles) v[u].load(w + (size_t)tile * kWords, s + (size_t)tile * 8);
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
        row[h] = g < ROWS ? Tile<FORMAT>::row(x + tile * 64 + 32 * h) : make_uint4(0, 0, 0, 0);
      v[u].multiply(row, acc);
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
    finish<FORMAT>(o, i / 16, blockIdx.x * 16 + i % 16, sum);
  }
}

// Each warp takes 16 weights' rows after another, and loads U tiles ahead across their ends. For
// lm_head, whose rows are many. Shared memory: ROWS * (64 * tiles + 32) * 2 bytes.
template <class FORMAT, int WARPS, int U, int ROWS>
__global__ void __launch_bounds__(WARPS * 32) wide(Operands o) {
  extern __shared__ __align__(16) bf16 shared[];
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, k = o.tiles * 64;
  const int blocks = (o.n + 15) / 16, step = gridDim.x * WARPS;
  const int first = threadIdx.x / 32 * gridDim.x + blockIdx.x;
  constexpr int kWords = 32 * FORMAT::kParts;
  const uint4* w = o.weights + (size_t)first * o.tiles * kWords + lane;
  const unsigned* s = o.scales + (size_t)first * o.tiles * 8 + g;
  Tile<FORMAT> v[U];
  int next_block = first, next_tile = 0;
  auto load = [&](int u) {
    if (next_block < blocks) v[u].load(w, s);
    w += kWords;
    s += 8;
    if (++next_tile == o.tiles) {
      next_tile = 0;
      next_block += step;
      w += (size_t)(step - 1) * o.tiles * kWords;
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
        Tile<FORMAT>::row(o.x + (size_t)row * k + at);
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
      const Tile<FORMAT> now = v[u];
      load(u);
      now.multiply(row, acc);
      if (++tile < o.tiles) continue;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (2 * q + i % 2 < ROWS) finish<FORMAT>(o, 2 * q + i % 2, block * 16 + g + i / 2 * 8, acc[i]);
        acc[i] = 0;
      }
      tile = 0;
      block += step;
    }
  }
}

}  // namespace dense
