// Where the CUDA sources of the decode kernels put weights, scales and biases, and how large their
// operands are: prints JSON, computed on the CPU by their own functions.
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <vector>

#include "dense.cuh"
#include "experts.cuh"
#include "layer.cuh"
#include "row_major.cuh"
#include "rotary.cuh"

static unsigned state = 11;
static unsigned dice() { return (state = state * 1664525u + 1013904223u) >> 16; }

template <class T> void list(const char* name, const std::vector<T>& values, const char* end = ", ") {
  std::printf("\"%s\": [", name);
  for (size_t i = 0; i < values.size(); i++) std::printf("%s%lld", i ? ", " : "", (long long)values[i]);
  std::printf("]%s", end);
}

// What lanes read of the weights of the first tile: halves of words, by n and k as `mma` takes them.
template <class FORMAT> std::vector<unsigned> read(const std::vector<unsigned>& words) {
  std::vector<unsigned> found(16 * 64);
  for (int lane = 0; lane < 32; lane++)
    for (int h = 0; h < 2; h++) {
      unsigned own[FORMAT::kWords], both[2][4];
      for (int i = 0; i < FORMAT::kWords; i++)
        own[i] = i / 4 * 4 + 4 > FORMAT::kWords ? words[i / 4 * 128 + lane * 2 + i % 4] : words[i / 4 * 128 + lane * 4 + i % 4];
      FORMAT::half(own, h, both[0], both[1]);
      for (int r = 0; r < 2; r++)
        for (int i = 0; i < 8; i++)
          found[(lane / 4 + 8 * r) * 64 + 32 * h + lane % 4 * 8 + i] = both[r][i / 2] >> (16 * (i % 2)) & 0xffff;
    }
  return found;
}

template <class FORMAT> void packed(const char* name, int bits, const char* end) {
  const int n = 40, k = 192, tiles = k / 64, rows = (n + 15) / 16 * 16, groups = tiles * FORMAT::kScales;
  std::vector<unsigned> codes(n * k), scales(n * groups), put((size_t)rows * groups);
  std::vector<unsigned> words((size_t)rows * k * bits / 32);
  for (int row = 0; row < n; row++) {
    for (int column = 0; column < k; column++) {
      unsigned code = dice() % (1u << bits);
      if ((name[0] == 'i') && code == 1u << (bits - 1)) code = 0;  // integers have one zero
      codes[row * k + column] = code;
      FORMAT::put(words.data(), code, row, column, tiles);
    }
    for (int group = 0; group < groups; group++)
      put[FORMAT::scale_of(row, group, tiles)] = scales[row * groups + group] = dice() % 127;
  }
  std::printf("\"%s\": {\"n\": %d, \"k\": %d, ", name, n, k);
  list("codes", codes);
  list("scales", scales);
  list("words", std::vector<int>(words.begin(), words.end()));
  list("read", read<FORMAT>(words));
  list("packed_scales", put, "}");
  std::printf("%s", end);
}

// Codes have sign, exponent and mantissa (1, 4, 7 bits); the largest exponent is there in each tile.
void lossless(const char* end) {
  const int n = 40, k = 192, tiles = k / 64, rows = (n + 15) / 16 * 16;
  std::vector<unsigned> codes(n * k), words((size_t)rows * k * 12 / 32);
  for (int row = 0; row < n; row++)
    for (int column = 0; column < k; column++) {
      unsigned code = dice() % 4096;
      if ((code >> 7) % 16 == 0) code &= 2048;
      if (row % 16 == 0 && column % 64 == 0) code |= 15 << 7;
      dense::Lossless::put(words.data(), codes[row * k + column] = code, row, column, tiles);
    }
  std::printf("\"lossless\": {\"n\": %d, \"k\": %d, ", n, k);
  list("codes", codes);
  list("words", std::vector<int>(words.begin(), words.end()));
  list("read", read<dense::Lossless>(words), "}");
  std::printf("%s", end);
}

// Places of all slots and heads of a cache: 6 blocks of 16, 2 heads.
void cache(const char* name, long long block, long long head, long long slot, const char* end) {
  rotary::Operands o = {};
  o.block_stride = block, o.head_stride = head, o.slot_stride = slot, o.block_size = 16;
  std::vector<long long> places;
  for (int i = 0; i < 6 * 16; i++)
    for (int h = 0; h < 2; h++) places.push_back(rotary::place(o, i, h));
  std::printf("\"%s\": {", name);
  list<long long>("strides", {block, head, slot});
  list("places", places, "}");
  std::printf("%s", end);
}

// All BF16 numbers in E4M3, as a cache has them with a scale.
void e4m3(const char* name, float scale, const char* end) {
  std::vector<int> found;
  for (unsigned i = 0; i < 65536; i += 8) {
    unsigned short from[8];
    for (unsigned j = 0; j < 8; j++) from[j] = i + j;
    uint4 eight;
    alignas(8) unsigned char to[8];
    std::memcpy(&eight, from, 16);
    rotary::put_e4m3(to, eight, scale);
    found.insert(found.end(), to, to + 8);
  }
  list(name, found, end);
}

#define AT(kind, field) (int)offsetof(kind, field)

int main() {
  std::printf("{\"packed\": {");
  packed<dense::Mxfp4>("mxfp4", 4, ", ");
  packed<dense::Mxfp8>("mxfp8", 8, ", ");
  packed<dense::Int8>("int8", 8, ", ");
  packed<dense::Int6>("int6", 6, ", ");
  packed<dense::Nvfp4>("nvfp4", 4, "}, ");
  lossless(", ");
  std::vector<unsigned> two;  // of scales (byte, 0, byte, 0) and (0, byte, 0, byte)
  for (unsigned byte = 0; byte < 127; byte++)
    two.push_back(dense::Nvfp4::two(byte * 0x10001u, 0)), two.push_back(dense::Nvfp4::two(byte * 0x1000100u, 1));
  list("two", two);
  std::vector<int> place, scales, biases;
  for (int lane = 0; lane < 32; lane++)
    for (int word = 0; word < 4; word++)
      for (int nibble = 0; nibble < 8; nibble++) {
        int k, n;
        experts::place(lane, word, nibble, k, n);
        place.push_back(k), place.push_back(n);
      }
  for (int column = 0; column < 64; column++) scales.push_back(experts::scale_at(column));
  for (int column = 0; column < 32; column++) biases.push_back(experts::bias_at(column));
  list("place", place);
  list("scale_at", scales);
  list("bias_at", biases);
  const int columns = 384, groups = 8;
  std::vector<int> scale_at, column_of, chunk_at;
  for (int column = 0; column < columns; column++)
    for (int group = 0; group < groups; group++) scale_at.push_back(row_major::scale_at(column, group, groups * 32));
  for (int tile = 0; tile < row_major::tiles(columns); tile++)
    for (int column = 0; column < 32; column++) column_of.push_back(row_major::column_of(tile, column));
  for (int chunk = 0; chunk < 48; chunk++) chunk_at.push_back(row_major::chunk_at(chunk));
  std::printf("\"row_major\": {\"columns\": %d, \"groups\": %d, ", columns, groups);
  list("scale_at", scale_at);
  list("column_of", column_of);
  list("chunk_at", chunk_at, "}, ");
  using D = dense::Operands;
  using E = experts::Operands;
  using X = dense::Expanded;
  using C = layer::Combined;
  using N = layer::Normed;
  using R = layer::Routed;
  using T = rotary::Operands;
  std::printf("\"caches\": {");
  cache("heads first", 2 * 16 * 128, 16 * 128, 128, ", ");
  cache("slots first", 2 * 16 * 128, 128, 2 * 128, "}, ");
  std::printf("\"e4m3\": {");
  e4m3("0.37", 0.37f, ", ");
  e4m3("1", 1, "}, ");
  std::printf("\"structures\": {");
  list<int>("Dense", {(int)sizeof(D), AT(D, x), AT(D, weights), AT(D, scales), AT(D, bias), AT(D, residual),
                      AT(D, out), AT(D, n), AT(D, tiles), AT(D, rows), AT(D, factor),
                      AT(D, listed)});
  list<int>("Expand", {(int)sizeof(X), AT(X, weights), AT(X, scales), AT(X, out), AT(X, n), AT(X, tiles),
                       AT(X, factor), AT(X, listed)});
  list<int>("Combine", {(int)sizeof(C), AT(C, experts), AT(C, ids), AT(C, residual), AT(C, norm), AT(C, sum),
                        AT(C, normed), AT(C, k), AT(C, epsilon)});
  list<int>("Norm", {(int)sizeof(N), AT(N, x), AT(N, residual), AT(N, norm), AT(N, sum), AT(N, normed), AT(N, k),
                     AT(N, epsilon)});
  list<int>("Rotary", {(int)sizeof(T), AT(T, qkv), AT(T, cos_sin), AT(T, positions), AT(T, slots), AT(T, queries),
                       AT(T, cache), AT(T, k_scale), AT(T, v_scale), AT(T, block_stride), AT(T, head_stride),
                       AT(T, slot_stride), AT(T, heads), AT(T, kv_heads), AT(T, block_size), AT(T, written)});
  list<int>("Route", {(int)sizeof(R), AT(R, x), AT(R, residual), AT(R, norm), AT(R, weights), AT(R, bias),
                      AT(R, sum), AT(R, normed), AT(R, logits), AT(R, ids), AT(R, k), AT(R, n), AT(R, rows),
                      AT(R, epsilon)});
  list<int>("Expert", {(int)sizeof(E), AT(E, x), AT(E, weights), AT(E, scales), AT(E, bias), AT(E, ids),
                       AT(E, shares), AT(E, logits), AT(E, padding), AT(E, out), AT(E, k), AT(E, n), AT(E, stride),
                       AT(E, rows), AT(E, pitch), AT(E, experts)}, "}}\n");
  return 0;
}
