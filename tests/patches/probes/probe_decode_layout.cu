// Where the CUDA sources of the decode kernels put weights, scales and biases, and how large their
// operands are: prints JSON, computed on the CPU by their own functions.
#include <cstddef>
#include <cstdio>
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

template <class FORMAT> void packed(const char* name, int bits, const char* end) {
  const int n = 40, k = 192, tiles = k / 64, rows = (n + 15) / 16 * 16, groups = tiles * FORMAT::kScales;
  std::vector<unsigned> codes(n * k), scales(n * groups), put((size_t)rows * groups);
  std::vector<unsigned> words((size_t)rows * k * bits / 32);
  for (int row = 0; row < n; row++) {
    for (int column = 0; column < k; column++) {
      unsigned code = dice() % (1u << bits);
      if (FORMAT::kScales == 1 && code == 128) code = 0;  // INT8 has one zero
      codes[row * k + column] = code;
      FORMAT::put(words.data(), code, row, column, tiles);
    }
    for (int group = 0; group < groups; group++)
      put[FORMAT::scale_of(row, group, tiles)] = scales[row * groups + group] = dice() % 191;
  }
  std::printf("\"%s\": {\"n\": %d, \"k\": %d, ", name, n, k);
  list("codes", codes);
  list("scales", scales);
  list("words", std::vector<int>(words.begin(), words.end()));
  list("packed_scales", put, "}");
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

#define AT(kind, field) (int)offsetof(kind, field)

int main() {
  std::printf("{\"packed\": {");
  packed<dense::Mxfp4>("mxfp4", 4, ", ");
  packed<dense::Mxfp8>("mxfp8", 8, ", ");
  packed<dense::Int8>("int8", 8, "}, ");
  std::vector<unsigned> pairs;  // of bytes that follow one another
  for (unsigned byte = 0; byte < 256; byte++) {
    unsigned first, second;
    dense::Int8::pairs(byte | (byte + 1) % 256 << 8 | (byte + 2) % 256 << 16 | (byte + 3) % 256 << 24, first, second);
    pairs.push_back(first), pairs.push_back(second);
  }
  list("int8_pairs", pairs);
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
  std::printf("\"structures\": {");
  list<int>("Dense", {(int)sizeof(D), AT(D, x), AT(D, weights), AT(D, scales), AT(D, bias), AT(D, residual),
                      AT(D, out), AT(D, n), AT(D, tiles), AT(D, rows)});
  list<int>("Expand", {(int)sizeof(X), AT(X, weights), AT(X, scales), AT(X, out), AT(X, n), AT(X, tiles)});
  list<int>("Combine", {(int)sizeof(C), AT(C, experts), AT(C, ids), AT(C, residual), AT(C, norm), AT(C, sum),
                        AT(C, normed), AT(C, k), AT(C, epsilon)});
  list<int>("Norm", {(int)sizeof(N), AT(N, x), AT(N, residual), AT(N, norm), AT(N, sum), AT(N, normed), AT(N, k),
                     AT(N, epsilon)});
  list<int>("Rotary", {(int)sizeof(T), AT(T, qkv), AT(T, cos_sin), AT(T, positions), AT(T, slots), AT(T, queries),
                       AT(T, cache), AT(T, block_stride), AT(T, head_stride), AT(T, slot_stride), AT(T, heads),
                       AT(T, kv_heads), AT(T, block_size), AT(T, written)});
  list<int>("Route", {(int)sizeof(R), AT(R, x), AT(R, residual), AT(R, norm), AT(R, weights), AT(R, bias),
                      AT(R, sum), AT(R, normed), AT(R, logits), AT(R, ids), AT(R, k), AT(R, n), AT(R, rows),
                      AT(R, epsilon)});
  list<int>("Expert", {(int)sizeof(E), AT(E, x), AT(E, weights), AT(E, scales), AT(E, bias), AT(E, ids),
                       AT(E, shares), AT(E, logits), AT(E, padding), AT(E, out), AT(E, k), AT(E, n), AT(E, stride),
                       AT(E, rows), AT(E, pitch), AT(E, experts)}, "}}\n");
  return 0;
}
