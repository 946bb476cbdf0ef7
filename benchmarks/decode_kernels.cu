// Checks the decode kernels against float64 and times them at gpt-oss-120b's shapes:
//   nvcc -O3 -std=c++17 -arch=sm_90a -I kernels/csrc -o bench benchmarks/decode_kernels.cu && ./bench
// Times: median of 15, in a CUDA graph of 36 calls with dependent launches, over weights that no cache
// holds.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kernels.cu"

#define CHECK(call)                                                            \
  do {                                                                         \
    cudaError_t error = (call);                                                \
    if (error != cudaSuccess) {                                                \
      printf("%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(error));     \
      exit(1);                                                                 \
    }                                                                          \
  } while (0)

static int multiprocessors;
static bool all_right = true;
static unsigned state = 7;
static unsigned dice() { return (state = state * 1664525u + 1013904223u) >> 8; }
static float between(int low, int high, float unit) {
  return (low + (int)(dice() % (high - low + 1))) * unit;
}
static const double kE2m1[8] = {0, .5, 1, 1.5, 2, 3, 4, 6};
static double value_of(unsigned code) { return code & 8 ? -kE2m1[code & 7] : kE2m1[code & 7]; }

// What a code of each format stands for, its name, and random codes.
template <class FORMAT> struct Codes;
template <> struct Codes<dense::Mxfp4> {
  static constexpr const char* kName = "MXFP4";
  static unsigned any() { return dice() & 15; }
  static double value(unsigned code) { return value_of(code); }
};
template <> struct Codes<dense::Mxfp8> {
  static constexpr const char* kName = "MXFP8";
  static unsigned any() {
    const unsigned code = dice() & 255;
    return (code & 127) == 127 ? 0 : code;  // NaN
  }
  static double value(unsigned code) {
    const int exponent = code >> 3 & 15, mantissa = code & 7;
    const double size = exponent ? ldexp(8 + mantissa, exponent - 10) : ldexp(mantissa, -9);
    return code & 128 ? -size : size;
  }
};
template <> struct Codes<dense::Bf16> {
  static constexpr const char* kName = "BF16";
  static unsigned any() { return __bfloat16_as_ushort(__float2bfloat16(between(-2000, 2000, 1 / 900.f))); }
  static double value(unsigned code) { return __bfloat162float(__ushort_as_bfloat16(code)); }
};

// Puts a code where the kernels look for it.
template <class FORMAT> void put(unsigned* words, unsigned code, int n, int k, int tiles) {
  if constexpr (FORMAT::kScaled)
    FORMAT::put(words, code, n, k, tiles);
  else
    words[((size_t)n * tiles * 64 + k) / 2] |= code << (16 * (k % 2));
}

template <class T> struct Device {  // an array on the device
  T* data;
  explicit Device(size_t count) { CHECK(cudaMalloc(&data, count * sizeof(T))); }
  explicit Device(const std::vector<T>& from) : Device(from.size()) {
    CHECK(cudaMemcpy(data, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  Device(const Device&) = delete;
  ~Device() { cudaFree(data); }
  std::vector<T> read(size_t count) const {
    std::vector<T> to(count);
    CHECK(cudaMemcpy(to.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
    return to;
  }
};

__global__ void scatter(unsigned* p, size_t n) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    unsigned z = i * 2654435761u;
    z = (z ^ z >> 15) * 2246822519u;
    p[i] = z ^ z >> 13;
  }
}

template <class Kernel, class Operands>
void launch(cudaStream_t stream, Kernel kernel, dim3 grid, int threads, int shared, Operands o) {
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  CHECK(cudaLaunchKernelEx(&config, kernel, o));
}

template <class Call> float microseconds(Call call) {
  constexpr int kCalls = 36;
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t runnable;
  CHECK(cudaStreamCreate(&stream));
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  for (int i = 0; i < kCalls; i++) call(stream, i);
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&runnable, graph, 0));
  cudaEvent_t begin, end;
  CHECK(cudaEventCreate(&begin));
  CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < 16; i++) {
    CHECK(cudaEventRecord(begin, stream));
    CHECK(cudaGraphLaunch(runnable, stream));
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    float ms;
    CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i) times.push_back(ms * 1000 / kCalls);  // the first warms up
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

static void judge(const char* what, double worst, double limit) {
  const bool right = worst <= limit;
  all_right &= right;
  printf("%-44s error beyond BF16's rounding %.1e of the magnitudes: %s\n", what, worst,
         right ? "right" : "WRONG");
}

// -- dense ------------------------------------------------------------------------------------------

using DenseKernel = void (*)(dense::Operands);
struct DenseKernels {
  DenseKernel narrow_12, narrow_16, wide;
};
#define KERNELS(NAME, ROWS) \
  { dense_##NAME##_narrow_12_##ROWS, dense_##NAME##_narrow_16_##ROWS, dense_##NAME##_wide_##ROWS }
template <class FORMAT> DenseKernels kernels_of(int rows) {
  if constexpr (FORMAT::kParts == 1) return rows > 8 ? DenseKernels KERNELS(mxfp4, 16) : DenseKernels KERNELS(mxfp4, 8);
  if constexpr (FORMAT::kParts == 2) return rows > 8 ? DenseKernels KERNELS(mxfp8, 16) : DenseKernels KERNELS(mxfp8, 8);
  return rows > 8 ? DenseKernels KERNELS(bf16, 16) : DenseKernels KERNELS(bf16, 8);
}

template <class FORMAT> void run_dense(cudaStream_t stream, dense::Operands o, bool wide) {
  const DenseKernels kernels = kernels_of<FORMAT>(o.rows);
  if (wide)
    launch(stream, kernels.wide, dim3(multiprocessors), 640, (o.rows > 8 ? 16 : 8) * (o.tiles * 64 + 32) * 2, o);
  else if (o.tiles > 48)
    launch(stream, kernels.narrow_16, dim3((o.n + 15) / 16), 512, 0, o);
  else
    launch(stream, kernels.narrow_12, dim3((o.n + 15) / 16), 384, 0, o);
}

template <class FORMAT, int ROWS> void check_dense(int n, int k, bool wide) {
  const int tiles = k / 64, blocks = (n + 15) / 16;
  std::vector<unsigned> weights((size_t)blocks * tiles * 128 * FORMAT::kParts);
  std::vector<unsigned char> packed((size_t)blocks * tiles * 32), scales((size_t)n * k / 32);
  std::vector<double> plain((size_t)n * k);
  std::vector<bf16> x((size_t)ROWS * k), bias(n), residual((size_t)ROWS * n);
  for (int i = 0; i < n; i++)
    for (int j = 0; j < k / 32; j++)  // some rows have the extremes
      packed[dense::scale_of(i, j, tiles)] = scales[(size_t)i * k / 32 + j] =
          i % 97 == 5 ? (dice() % 2 ? 0 : 190) : 110 + dice() % 12;
  for (int i = 0; i < n; i++)
    for (int j = 0; j < k; j++) {
      const unsigned code = Codes<FORMAT>::any();
      put<FORMAT>(weights.data(), code, i, j, tiles);
      plain[(size_t)i * k + j] = Codes<FORMAT>::value(code) * (FORMAT::kScaled ? ldexp(1, (int)scales[(size_t)i * k / 32 + j / 32] - 127) : 1);
    }
  for (auto& v : x) v = __float2bfloat16(between(-2000, 2000, 1 / 500.f));
  for (auto& v : bias) v = __float2bfloat16(between(-1000, 1000, 1 / 100.f));
  for (auto& v : residual) v = __float2bfloat16(between(-1000, 1000, 1 / 10.f));
  Device<unsigned> w(weights);
  Device<unsigned char> s(packed);
  Device<bf16> dx(x), db(bias), dr(residual), out((size_t)ROWS * n);
  run_dense<FORMAT>(0, {dx.data, (const uint4*)w.data, (const unsigned*)s.data, db.data, dr.data, out.data, n, tiles, ROWS}, wide);
  const std::vector<bf16> got = out.read((size_t)ROWS * n);
  double worst = 0;
  if constexpr (FORMAT::kScaled) {
    Device<bf16> expanded((size_t)n * k);
    constexpr auto expand = FORMAT::kParts == 1 ? expand_mxfp4 : expand_mxfp8;
    launch(0, expand, dim3(blocks), 256, 0, dense::Expanded{(const uint4*)w.data, (const unsigned*)s.data, expanded.data, n, tiles});
    const std::vector<bf16> values = expanded.read((size_t)n * k);
    for (size_t i = 0; i < values.size(); i++)  // 2^-133 is BF16's smallest
      if (__bfloat162float(values[i]) != plain[i] && fabs(plain[i]) >= ldexp(1, -126)) worst = INFINITY;
  }
  for (int row = 0; row < ROWS; row++)
    for (int i = 0; i < n; i++) {
      double sum = __bfloat162float(bias[i]) + (double)__bfloat162float(residual[(size_t)row * n + i]);
      double magnitude = fabs(sum);
      for (int j = 0; j < k; j++) {
        const double term = plain[(size_t)i * k + j] * __bfloat162float(x[(size_t)row * k + j]);
        sum += term;
        magnitude += fabs(term);
      }
      const double error = fabs(__bfloat162float(got[(size_t)row * n + i]) - sum) - fabs(sum) / 256;
      worst = std::max(worst, std::isnan(error) ? INFINITY : error / magnitude);
    }
  char what[64];
  snprintf(what, sizeof what, "%s %d x %d, %d rows, %s", Codes<FORMAT>::kName, n, k, ROWS, wide ? "wide" : "narrow");
  judge(what, worst, 2e-6);
}

template <class FORMAT> void check_dense_all() {
  check_dense<FORMAT, 1>(5120, 2880, false);
  check_dense<FORMAT, 3>(2880, 4096, false);
  check_dense<FORMAT, 8>(5120, 2880, false);
  check_dense<FORMAT, 5>(1000, 2048, false);
  check_dense<FORMAT, 8>(2891, 64, false);
  check_dense<FORMAT, 1>(2891, 2048, true);
  check_dense<FORMAT, 8>(5120, 2880, true);
  check_dense<FORMAT, 4>(37, 64, true);
  check_dense<FORMAT, 16>(2891, 2880, false);
  check_dense<FORMAT, 11>(2880, 4096, false);
  check_dense<FORMAT, 13>(2891, 2880, true);
}

struct DenseOperands {
  Device<unsigned> weights{(size_t)2 << 30}, scales{(size_t)1 << 27};
  Device<bf16> x{16 * 8192}, out{(size_t)16 * 201088};
};
const DenseOperands& dense_operands() {
  static const DenseOperands operands;
  static bool filled = false;
  if (!filled) {
    scatter<<<2048, 256>>>(operands.weights.data, (size_t)2 << 30);
    CHECK(cudaMemset(operands.scales.data, 120, (size_t)4 << 27));
    CHECK(cudaMemset(operands.x.data, 0x3c, 16 * 8192 * 2));
    filled = true;
  }
  return operands;
}

template <class FORMAT, int ROWS> void time_dense(const char* name, int n, int k, bool wide) {
  const DenseOperands& operands = dense_operands();
  const int tiles = k / 64;
  const size_t words = (size_t)(n + 15) / 16 * tiles * 128 * FORMAT::kParts;
  const size_t copies = std::min<size_t>(36, ((size_t)2 << 30) / words);
  const float us = microseconds([&](cudaStream_t stream, int i) {
    const size_t at = i % copies * words;
    run_dense<FORMAT>(stream, {operands.x.data, (const uint4*)(operands.weights.data + at), operands.scales.data + at / 16 / FORMAT::kParts, operands.x.data, nullptr, operands.out.data, n, tiles, ROWS}, wide);
  });
  const double bytes = FORMAT::kParts * .5 + (FORMAT::kScaled ? 1 / 32. : 0);
  printf("%s %-8s %6d x %d, %d rows: %7.2f us, %.2f TB/s\n", Codes<FORMAT>::kName, name, n, k, ROWS, us, (double)n * k * bytes / us / 1e6);
}

template <class FORMAT, int ROWS> void time_dense_of() {
  time_dense<FORMAT, ROWS>("qkv", 5120, 2880, false);
  time_dense<FORMAT, ROWS>("o", 2880, 4096, false);
  time_dense<FORMAT, ROWS>("qkv of 2", 2560, 2880, false);
  time_dense<FORMAT, ROWS>("o of 2", 2880, 2048, false);
  time_dense<FORMAT, ROWS>("lm_head", 201088, 2880, true);
  if constexpr (!FORMAT::kScaled) time_dense<FORMAT, ROWS>("router", 128, 2880, false);
}
template <class FORMAT> void time_dense_all() {
  time_dense_of<FORMAT, 1>();
  time_dense_of<FORMAT, 2>();
  time_dense_of<FORMAT, 4>();
  time_dense_of<FORMAT, 8>();
  time_dense_of<FORMAT, 16>();
}

// -- experts ----------------------------------------------------------------------------------------

struct MarlinOrder {
  static constexpr bool kRowMajor = false;
  static int bias_at(int column) { return column / 32 * 32 + experts::bias_at(column % 32); }
  static int tiles(int n) { return n / 64; }
  static int in_shared(int k) { return k + 32; }
};
struct RowMajorOrder {
  static constexpr bool kRowMajor = true;
  static int bias_at(int column) { return column; }
  static int tiles(int n) { return row_major::tiles(n); }
  static int in_shared(int k) { return row_major::in_shared(k); }
};
template <class ORDER> constexpr bool kRowMajor = ORDER::kRowMajor;
template <class ORDER> constexpr const char* kOrder = kRowMajor<ORDER> ? "row-major" : "Marlin";
int up_to_128(int n) { return (n + 127) / 128 * 128; }

// Made-up weights of all experts, as a MoE backend keeps them, and plain [experts][k][n]. Columns of gate_up
// are gate and up in turn in the latter.
template <class ORDER> struct Experts {
  int count, k, n, stride, pitch;
  bool gate_up;
  std::vector<float> plain, plain_bias;
  Device<unsigned> weights;
  Device<unsigned char> scales;
  Device<bf16> bias;

  Experts(int count, int k, int n, bool gate_up)
      : count(count), k(k), n(n), stride(!kRowMajor<ORDER> ? n : gate_up ? 2 * up_to_128(n / 2) : up_to_128(n)),
        pitch(kRowMajor<ORDER> ? up_to_128(k) : k), gate_up(gate_up), plain((size_t)count * k * n),
        plain_bias((size_t)count * n), weights((size_t)count * pitch * stride / 8),
        scales((size_t)count * pitch / 32 * stride), bias((size_t)count * stride) {
    std::vector<unsigned> w((size_t)count * pitch * stride / 8);
    std::vector<unsigned char> s((size_t)count * pitch / 32 * stride);
    std::vector<bf16> b((size_t)count * stride);
    // some are the extremes
    auto exponent = [](int expert, int group, int column) {
      return column % 97 == 5 ? 0 : 112 + (group * 7 + column * 3 + expert) % 9;
    };
    auto set = [&](int e, int row, int column, unsigned code) {
      plain[((size_t)e * k + row) * n + column] = value_of(code) * ldexp(1, exponent(e, row / 32, column) - 127);
    };
    for (int e = 0; e < count; e++) {
      unsigned char* scale = &s[(size_t)e * pitch / 32 * stride];
      unsigned* word = &w[(size_t)e * pitch * stride / 8];
      if constexpr (kRowMajor<ORDER>) {
        for (int i = 0; i < n; i++) {
          const int column = gate_up ? i / 2 + (i % 2 ? 0 : stride / 2) : i;
          for (int group = 0; group < k / 32; group++) scale[row_major::scale_at(column, group, pitch)] = exponent(e, group, i);
          for (int row = 0; row < k; row++) {
            const unsigned code = dice() & 15;
            word[((size_t)column * pitch + row) / 8] |= code << (row % 8 * 4);
            set(e, row, i, code);
          }
        }
      } else {
        for (int group = 0; group < k / 32; group++)
          for (int i = 0; i < n; i++) scale[(size_t)group * n + i / 64 * 64 + experts::scale_at(i % 64)] = exponent(e, group, i);
        for (size_t at = 0; at < (size_t)k * n / 8; at++) {
          const int lane = at / 4 % 32, tile = at / 128 % (n / 64), tile_k = at / 128 / (n / 64);
          for (int p = 0; p < 8; p++) {
            const unsigned code = dice() & 15;
            int row, column;
            experts::place(lane, at % 4, p, row, column);
            word[at] |= code << (4 * p);
            set(e, tile_k * 16 + row, tile * 64 + column, code);
          }
        }
      }
      for (int i = 0; i < n; i++) {
        const bf16 v = __float2bfloat16(between(-100, 100, 1 / 100.f));
        plain_bias[(size_t)e * n + i] = __bfloat162float(v);
        const int column = kRowMajor<ORDER> && gate_up ? i / 2 + (i % 2 ? 0 : stride / 2) : i;
        b[(size_t)e * stride + ORDER::bias_at(column)] = v;
      }
    }
    CHECK(cudaMemcpy(weights.data, w.data(), w.size() * 4, cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(scales.data, s.data(), s.size(), cudaMemcpyHostToDevice));
    CHECK(cudaMemcpy(bias.data, b.data(), b.size() * 2, cudaMemcpyHostToDevice));
  }

  // x [k] times an expert, with its bias; `magnitude` gets the sum of the magnitudes
  std::vector<double> times(int expert, const bf16* x, std::vector<double>& magnitude) const {
    std::vector<double> sum(n);
    magnitude.assign(n, 0);
    for (int i = 0; i < n; i++) magnitude[i] = fabs(sum[i] = plain_bias[(size_t)expert * n + i]);
    for (int j = 0; j < k; j++)
      for (int i = 0; i < n; i++) {
        const double term = (double)__bfloat162float(x[j]) * plain[((size_t)expert * k + j) * n + i];
        sum[i] += term;
        magnitude[i] += fabs(term);
      }
    return sum;
  }
};

using ExpertsKernel = void (*)(experts::Operands);
constexpr int most_rows(int rows) { return rows > 4 ? 8 : rows > 2 ? 4 : rows; }

#define EXPERTS_OF(NAME) (most == 1 ? NAME##_1 : most == 2 ? NAME##_2 : most == 4 ? NAME##_4 : NAME##_8)
#define ROWS_OF(NAME) (most == 1 ? NAME##_1 : NAME##_8)
template <class ORDER> int shared_of(const experts::Operands& o) {
  return (kRowMajor<ORDER> ? std::min(o.rows, 2) : most_rows(o.rows)) * ORDER::in_shared(o.k) * 2;
}
template <class ORDER> void run_gate_up(cudaStream_t stream, experts::Operands o) {
  const int most = most_rows(o.rows), tiles = kRowMajor<ORDER> ? (most == 1 ? 2 : 4) : most == 8 ? 2 : 1;
  const ExpertsKernel kernel = kRowMajor<ORDER> ? ROWS_OF(experts_rows_gate_up) : EXPERTS_OF(experts_gate_up);
  const int all = kRowMajor<ORDER> ? 2 * ORDER::tiles(o.n / 2) : ORDER::tiles(o.n);
  launch(stream, kernel, dim3((all + tiles - 1) / tiles, o.rows * experts::kTop), 256, shared_of<ORDER>(o), o);
}
template <class ORDER> void run_down(cudaStream_t stream, experts::Operands o) {
  const int most = most_rows(o.rows), tiles = kRowMajor<ORDER> && most > 1 ? 2 : 1;
  const ExpertsKernel kernel = kRowMajor<ORDER> ? ROWS_OF(experts_rows_down) : EXPERTS_OF(experts_down);
  launch(stream, kernel, dim3(ORDER::tiles(o.n) / tiles, o.rows * experts::kTop), 256, shared_of<ORDER>(o), o);
}

template <class ORDER, int ROWS> void check_experts(const Experts<ORDER>& gate_up, const Experts<ORDER>& down) {
  const int slots = ROWS * experts::kTop, inner = gate_up.n / 2;
  const int columns = kRowMajor<ORDER> ? down.n : down.n - 64;  // the others only pad
  std::vector<bf16> x((size_t)ROWS * gate_up.k);
  std::vector<int> ids(slots);
  std::vector<float> shares(slots);
  for (auto& v : x) v = __float2bfloat16(between(-2000, 2000, 1 / 1000.f));
  for (int row = 0; row < ROWS; row++)  // four different ones a row, some of them also another row's
    for (int i = 0; i < experts::kTop; i++) ids[row * experts::kTop + i] = (row * 3 + i * 2 + (row == 5)) % gate_up.count;
  for (auto& v : shares) v = between(0, 1000, 1 / 1000.f);
  Device<bf16> dx(x), hidden((size_t)slots * inner);
  Device<int> di(ids);
  Device<float> ds(shares), sums((size_t)slots * columns);
  CHECK(cudaMemset(hidden.data, 0xff, (size_t)slots * inner * 2));
  CHECK(cudaMemset(sums.data, 0xff, (size_t)slots * columns * 4));
  run_gate_up<ORDER>(0, {dx.data, (const uint4*)gate_up.weights.data, gate_up.scales.data, gate_up.bias.data, di.data, ds.data, hidden.data, gate_up.k, gate_up.n, gate_up.stride, ROWS, gate_up.pitch});
  run_down<ORDER>(0, {hidden.data, (const uint4*)down.weights.data, down.scales.data, down.bias.data, di.data, ds.data, sums.data, inner, columns, down.stride, ROWS, down.pitch});
  const std::vector<bf16> h = hidden.read((size_t)slots * inner);
  const std::vector<float> got = sums.read((size_t)slots * columns);
  double worst_up = 0, worst_down = 0;
  std::vector<double> magnitude;
  for (int slot = 0; slot < slots; slot++) {
    const std::vector<double> both = gate_up.times(ids[slot], &x[(size_t)(slot / experts::kTop) * gate_up.k], magnitude);
    for (int i = 0; i < inner; i++) {
      const double gate = std::min(both[2 * i], 7.), linear = std::max(-7., std::min(both[2 * i + 1], 7.));
      const double wanted = (linear + 1) * gate / (1 + exp(-1.702 * gate));
      const double error = fabs(__bfloat162float(h[(size_t)slot * inner + i]) - wanted) - fabs(wanted) / 256;
      worst_up = std::max(worst_up, std::isnan(error) ? INFINITY : error / (magnitude[2 * i] + magnitude[2 * i + 1]));
    }
    const std::vector<double> sum = down.times(ids[slot], &h[(size_t)slot * inner], magnitude);
    for (int i = 0; i < columns; i++) {
      const double error = fabs(got[(size_t)slot * columns + i] - shares[slot] * sum[i]);
      worst_down = std::max(worst_down, std::isnan(error) ? INFINITY : error / (shares[slot] * magnitude[i] + 1e-30));
    }
  }
  char what[64];
  snprintf(what, sizeof what, "%s gate_up, %d rows", kOrder<ORDER>, ROWS);
  judge(what, worst_up, 2e-6);
  snprintf(what, sizeof what, "%s down, %d rows", kOrder<ORDER>, ROWS);
  judge(what, worst_down, 2e-6);
}

template <class ORDER> void check_experts_all() {
  // in row-major order the last tile of 128 columns, and the last step of 128 k, are parts
  const Experts<ORDER> gate_up(12, 320, kRowMajor<ORDER> ? 448 : 256, true), down(12, gate_up.n / 2, 256 + (kRowMajor<ORDER> ? 64 : 0), false);
  check_experts<ORDER, 1>(gate_up, down);
  check_experts<ORDER, 2>(gate_up, down);
  check_experts<ORDER, 3>(gate_up, down);
  check_experts<ORDER, 5>(gate_up, down);
  check_experts<ORDER, 8>(gate_up, down);
}

template <class ORDER, int ROWS> void time_experts() {
  constexpr int kCount = 128, kLayers = 5, kHidden = 2880, kInner = 2880;
  constexpr int kPadded = 2944;  // columns of down with Marlin's padding in the series; row-major: all sizes
  constexpr int kPitch = kRowMajor<ORDER> ? kPadded : kHidden, kUpStride = kRowMajor<ORDER> ? 2 * kPadded : 2 * kInner;
  constexpr size_t kUp = (size_t)kCount * kPitch * kUpStride / 8, kDown = (size_t)kCount * kPitch * kPadded / 8;
  static Device<unsigned> up(kLayers * kUp), down(kLayers * kDown);
  static Device<unsigned char> up_scales(kLayers * kUp / 4), down_scales(kLayers * kDown / 4);
  static Device<bf16> x(8 * kHidden), hidden(32 * kInner), bias(kCount * kUpStride);
  static Device<float> shares(32), sums(32 * kHidden);
  static std::vector<int> chosen;
  if (chosen.empty()) {
    scatter<<<2048, 256>>>(up.data, kLayers * kUp);
    scatter<<<2048, 256>>>(down.data, kLayers * kDown);
    CHECK(cudaMemset(up_scales.data, 120, kLayers * kUp / 4));
    CHECK(cudaMemset(down_scales.data, 120, kLayers * kDown / 4));
    CHECK(cudaMemset(x.data, 0x3c, 8 * kHidden * 2));
    CHECK(cudaMemset(hidden.data, 0x3c, 32 * kInner * 2));
    CHECK(cudaMemset(bias.data, 0, kCount * kUpStride * 2));
    CHECK(cudaMemset(shares.data, 0, 32 * 4));
    for (int row = 0; row < 64 * 8; row++)  // a uniform router
      for (size_t begin = chosen.size(); chosen.size() < begin + experts::kTop;) {
        const int one = dice() % kCount;
        if (std::find(chosen.begin() + begin, chosen.end(), one) == chosen.end()) chosen.push_back(one);
      }
  }
  static Device<int> ids(chosen);
  double distinct = 0;
  for (int i = 0; i < 36; i++) {
    std::vector<int> step(chosen.begin() + i * 32, chosen.begin() + i * 32 + ROWS * experts::kTop);
    std::sort(step.begin(), step.end());
    distinct += (std::unique(step.begin(), step.end()) - step.begin()) / 36.;
  }
  auto gate_up = [&](cudaStream_t stream, int i) {
    const size_t l = i % kLayers;
    run_gate_up<ORDER>(stream, {x.data, (const uint4*)(up.data + l * kUp), up_scales.data + l * kUp / 4, bias.data, ids.data + i * 32, shares.data, hidden.data, kHidden, 2 * kInner, kUpStride, ROWS, kPitch});
  };
  auto down_call = [&](cudaStream_t stream, int i) {
    const size_t l = i % kLayers;
    run_down<ORDER>(stream, {hidden.data, (const uint4*)(down.data + l * kDown), down_scales.data + l * kDown / 4, bias.data, ids.data + i * 32, shares.data, sums.data, kInner, kHidden, kPadded, ROWS, kPitch});
  };
  const float one = microseconds(gate_up), two = microseconds(down_call);
  const float both = microseconds([&](cudaStream_t stream, int i) {
    gate_up(stream, i);
    down_call(stream, i);
  });
  printf("experts, %s, %d rows, %4.1f of 128 read: gate_up %7.2f us, down %6.2f us, in turn %7.2f us, %.2f TB/s\n", kOrder<ORDER>, ROWS, distinct, one, two, both,
         distinct * 3 * kHidden * kInner * (.5 + 1 / 32.) / both / 1e6);
}

template <class ORDER> void time_experts_all() {
  time_experts<ORDER, 1>();
  time_experts<ORDER, 2>();
  time_experts<ORDER, 4>();
  time_experts<ORDER, 8>();
}

// -- between the products ---------------------------------------------------------------------------

void run_route(cudaStream_t stream, layer::Routed o) {
  const int most = most_rows(o.rows);
  const auto kernel = most == 1 ? route_1 : most == 2 ? route_2 : most == 4 ? route_4 : route_8;
  const int shared = most * (o.k + 32) * 2;
  CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {(unsigned)o.n / 16, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(o.n / 16);
  config.blockDim = dim3(layer::kThreads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  CHECK(cudaLaunchKernelEx(&config, kernel, o));
}

static std::vector<bf16> any(size_t count, float unit) {
  std::vector<bf16> values(count);
  for (auto& v : values) v = __float2bfloat16(between(-2000, 2000, unit));
  return values;
}
static double float_of(bf16 v) { return __bfloat162float(v); }

// The sum, its norm, and the four that a softmax of the router's product chooses; then the sum of four
// experts, with what follows.
void check_layer(int rows, int k, int n) {
  const auto x = any((size_t)rows * k, 1 / 500.f), residual = any((size_t)rows * k, 1 / 100.f), norm = any(k, 1 / 1000.f);
  const auto weights = any((size_t)n * k, 1 / 20000.f), bias = any(n, 1 / 1000.f);
  Device<bf16> dx(x), dr(residual), dn(norm), dw(weights), db(bias), sum((size_t)rows * k), normed((size_t)rows * k);
  Device<int> ids(rows * 4);
  Device<float> shares(rows * 4);
  run_route(0, {dx.data, dr.data, dn.data, dw.data, db.data, nullptr, sum.data, normed.data, ids.data, shares.data, k, n, rows, 1e-5f});
  const auto got_sum = sum.read((size_t)rows * k), got_normed = normed.read((size_t)rows * k);
  const auto got_ids = ids.read(rows * 4);
  const auto got_shares = shares.read(rows * 4);
  double worst = 0;
  auto judged = [&](double got, double wanted, double scale) { worst = std::max(worst, std::isnan(got) ? INFINITY : (fabs(got - wanted) - fabs(wanted) / 256) / scale); };
  for (int row = 0; row < rows; row++) {
    double squares = 0;
    std::vector<double> both(k), logits(n);
    for (int i = 0; i < k; i++) {
      both[i] = float_of(x[(size_t)row * k + i]) + float_of(residual[(size_t)row * k + i]);
      squares += both[i] * both[i];
      judged(float_of(got_sum[(size_t)row * k + i]), both[i], 1);
    }
    for (int i = 0; i < k; i++) judged(float_of(got_normed[(size_t)row * k + i]), both[i] / sqrt(squares / k + 1e-5) * float_of(norm[i]), 1);
    for (int e = 0; e < n; e++) {
      logits[e] = float_of(bias[e]);
      for (int i = 0; i < k; i++) logits[e] += float_of(got_normed[(size_t)row * k + i]) * float_of(weights[(size_t)e * k + i]);
    }
    // what was chosen is as large as the true four, up to BF16's rounding of a logit, and has their shares
    std::vector<double> sorted = logits;
    std::sort(sorted.rbegin(), sorted.rend());
    double total = 0;
    for (int i = 0; i < 4; i++) total += exp(float_of(__float2bfloat16(logits[got_ids[row * 4 + i]])));
    for (int i = 0; i < 4; i++) {
      const int id = got_ids[row * 4 + i];
      judged(logits[id], sorted[i], 1);
      for (int j = 0; j < i; j++) if (got_ids[row * 4 + j] == id) worst = INFINITY;
      // a logit may be rounded to the other side
      if (fabs(got_shares[row * 4 + i] - exp(float_of(__float2bfloat16(logits[id]))) / total) > 0.02) worst = INFINITY;
    }
  }
  // the same, with the last row padding: it has no experts, and the others have the same
  std::vector<char> pads(rows);
  pads[rows - 1] = 1;
  Device<char> padding(pads);
  run_route(0, {dx.data, dr.data, dn.data, dw.data, db.data, (const bool*)padding.data, sum.data, normed.data, ids.data, shares.data, k, n, rows, 1e-5f});
  const auto padded_ids = ids.read(rows * 4);
  for (int i = 0; i < rows * 4; i++) if (padded_ids[i] != (i / 4 == rows - 1 ? -1 : got_ids[i])) worst = INFINITY;
  // residual and norm alone
  launch(0, add_norm, dim3(rows), layer::kThreads, 0, layer::Normed{dx.data, dr.data, dn.data, sum.data, normed.data, k, 1e-5f});
  const auto added = sum.read((size_t)rows * k), added_normed = normed.read((size_t)rows * k);
  for (int row = 0; row < rows; row++) {
    double squares = 0;
    std::vector<double> both(k);
    for (int i = 0; i < k; i++) {
      both[i] = float_of(x[(size_t)row * k + i]) + float_of(residual[(size_t)row * k + i]);
      squares += both[i] * both[i];
      judged(float_of(added[(size_t)row * k + i]), both[i], 1);
    }
    for (int i = 0; i < k; i++) judged(float_of(added_normed[(size_t)row * k + i]), both[i] / sqrt(squares / k + 1e-5) * float_of(norm[i]), 1);
  }
  std::vector<float> parts((size_t)rows * 4 * k);
  for (auto& v : parts) v = between(-2000, 2000, 1 / 700.f);
  auto some_ids = got_ids;
  some_ids[1] = -1;
  Device<float> dp(parts);
  Device<int> di(some_ids);
  launch(0, experts_combine, dim3(rows), layer::kThreads, 0, layer::Combined{dp.data, di.data, dr.data, dn.data, sum.data, normed.data, k, 1e-5f});
  const auto combined = sum.read((size_t)rows * k), then = normed.read((size_t)rows * k);
  launch(0, experts_combine, dim3(rows), layer::kThreads, 0, layer::Combined{dp.data, di.data, nullptr, nullptr, sum.data, nullptr, k, 0});
  const auto alone = sum.read((size_t)rows * k);
  for (int row = 0; row < rows; row++) {
    double squares = 0;
    std::vector<double> both(k);
    for (int i = 0; i < k; i++) {
      for (int slot = 0; slot < 4; slot++)
        if (some_ids[row * 4 + slot] >= 0) both[i] += parts[((size_t)row * 4 + slot) * k + i];
      judged(float_of(alone[(size_t)row * k + i]), both[i], 1);
      both[i] += float_of(residual[(size_t)row * k + i]);
      squares += both[i] * both[i];
      judged(float_of(combined[(size_t)row * k + i]), both[i], 1);
    }
    for (int i = 0; i < k; i++) judged(float_of(then[(size_t)row * k + i]), both[i] / sqrt(squares / k + 1e-5) * float_of(norm[i]), 1);
  }
  char what[64];
  snprintf(what, sizeof what, "norm, %d experts' router, sum: %d x %d", n, rows, k);
  judge(what, worst, 2e-5);
}

void time_layer(int rows) {
  constexpr int k = 2880, n = 128, kCopies = 36;
  static Device<bf16> x(8 * k), residual(8 * k), norm(k), weights((size_t)kCopies * n * k), bias(n), sum(8 * k), normed(8 * k);
  static Device<float> shares(32), parts(32 * k);
  static Device<int> ids(32);
  const float route = microseconds([&](cudaStream_t stream, int i) {
    run_route(stream, {x.data, residual.data, norm.data, weights.data + (size_t)i * n * k, bias.data, nullptr, sum.data, normed.data, ids.data, shares.data, k, n, rows, 1e-5f});
  });
  const float combine = microseconds([&](cudaStream_t stream, int) {
    launch(stream, experts_combine, dim3(rows), layer::kThreads, 0, layer::Combined{parts.data, ids.data, residual.data, norm.data, sum.data, normed.data, k, 1e-5f});
  });
  printf("norm and router, %d rows: %.2f us; sum of experts and norm: %.2f us\n", rows, route, combine);
}

// Rotary embedding against float64, values and all that is no row's slot to the bit. `heads_first`: whether
// a block of the cache has its heads one after the other, or its slots.
void check_rotary(int rows, int heads, int kv_heads, bool heads_first) {
  constexpr int kBlocks = 40, kBlockSize = 16, kPositions = 500, kHead = rotary::kHead, kHalf = rotary::kHalf;
  const int all = heads + 2 * kv_heads, written = rows > 2 ? rows - 1 : rows;  // the last only pads
  const auto qkv = any((size_t)rows * all * kHead, 1 / 300.f), before = any((size_t)kBlocks * kBlockSize * kv_heads * 2 * kHead, 1 / 300.f);
  std::vector<float> table(kPositions * kHead);
  for (int i = 0; i < kPositions; i++)
    for (int j = 0; j < kHalf; j++) {
      const double angle = i * pow(150000, -j / (double)kHalf);
      table[i * kHead + j] = 1.3466 * cos(angle);
      table[i * kHead + kHalf + j] = 1.3466 * sin(angle);
    }
  std::vector<long long> positions(rows), slots(written);
  for (auto& p : positions) p = dice() % kPositions;
  for (int i = 0; i < written; i++) slots[i] = (i * 37 + 5) % (kBlocks * kBlockSize);  // 37 is prime: all differ
  if (rows > 4) slots[1] = -1;
  Device<bf16> dx(qkv), queries((size_t)rows * heads * kHead), cache(before);
  Device<float> dt(table);
  Device<long long> dp(positions), ds(slots);
  const long long entry = 2 * kHead, block = entry * kBlockSize * kv_heads;
  const rotary::Operands o{dx.data, dt.data, dp.data, ds.data, queries.data, cache.data, block, heads_first ? entry * kBlockSize : entry, heads_first ? entry : entry * kv_heads, heads, kv_heads, kBlockSize, written};
  launch(0, rotate_and_cache, dim3(rows, (all * rotary::kShare + rotary::kThreads - 1) / rotary::kThreads), rotary::kThreads, 0, o);
  const auto got = queries.read((size_t)rows * heads * kHead), after = cache.read(before.size());
  double worst = 0;
  auto bits = [](bf16 v) { return __bfloat16_as_ushort(v); };
  std::vector<bool> free(before.size(), true);
  for (int row = 0; row < rows; row++)
    for (int head = 0; head < all; head++) {
      const bf16* from = &qkv[((size_t)row * all + head) * kHead];
      const bf16* to = nullptr;
      if (head < heads) to = &got[((size_t)row * heads + head) * kHead];
      const int group = (head - heads + 2 * kv_heads) % kv_heads;
      const bool value = head >= heads + kv_heads;
      if (head >= heads && row < written && slots[row] >= 0) {
        // block, then head or slot, as the strides say
        const long long at = slots[row] / kBlockSize * block + group * o.head_stride + slots[row] % kBlockSize * o.slot_stride + (value ? kHead : 0);
        to = &after[at];
        for (int i = 0; i < kHead; i++) free[at + i] = false;
      }
      for (int i = 0; to && i < kHalf; i++) {
        const double a = float_of(from[i]), b = float_of(from[i + kHalf]);
        const double cosine = table[positions[row] * kHead + i], sine = table[positions[row] * kHead + kHalf + i];
        const double wanted[2] = {a * cosine - b * sine, b * cosine + a * sine};
        for (int j = 0; j < 2; j++) {
          const bf16 found = to[i + j * kHalf];
          if (value) {
            if (bits(found) != bits(from[i + j * kHalf])) worst = INFINITY;
            continue;
          }
          const double error = fabs(float_of(found) - wanted[j]) - fabs(wanted[j]) / 256;
          worst = std::max(worst, std::isnan(error) ? INFINITY : error / (fabs(a * cosine) + fabs(b * sine) + 1e-30));
        }
      }
    }
  for (size_t i = 0; i < before.size(); i++)
    if (free[i] && bits(after[i]) != bits(before[i])) worst = INFINITY;
  char what[64];
  snprintf(what, sizeof what, "rotary and cache, %d + %d heads, %d rows", heads, kv_heads, rows);
  judge(what, worst, 2e-6);
}

void time_rotary(int rows) {
  constexpr int heads = 64, kv_heads = 8, all = heads + 2 * kv_heads, kBlockSize = 16, kBlocks = 4096, kPositions = 131072, kCopies = 36;
  static Device<bf16> qkv((size_t)2048 * all * 64), queries((size_t)2048 * heads * 64), cache((size_t)kCopies * kBlocks * kBlockSize * kv_heads * 128);
  static Device<float> table((size_t)kPositions * 64);
  std::vector<long long> positions(rows), slots(rows);
  for (int i = 0; i < rows; i++) positions[i] = dice() % kPositions, slots[i] = (i * 37 + 5) % (kBlocks * kBlockSize);
  const Device<long long> dp(positions), ds(slots);
  const float us = microseconds([&](cudaStream_t stream, int i) {
    const rotary::Operands o{qkv.data, table.data, dp.data, ds.data, queries.data, cache.data + (size_t)i * kBlocks * kBlockSize * kv_heads * 128, kBlockSize * kv_heads * 128, kBlockSize * 128, 128, heads, kv_heads, kBlockSize, rows};
    launch(stream, rotate_and_cache, dim3(rows, (all * rotary::kShare + rotary::kThreads - 1) / rotary::kThreads), rotary::kThreads, 0, o);
  });
  printf("rotary embedding and cache, %d rows: %.2f us\n", rows, us);
}

int main() {
  cudaDeviceProp device;
  CHECK(cudaGetDeviceProperties(&device, 0));
  multiprocessors = device.multiProcessorCount;
  printf("%s, %d.%d, %d multiprocessors\n", device.name, device.major, device.minor, multiprocessors);
  check_dense_all<dense::Mxfp4>();
  check_dense_all<dense::Mxfp8>();
  check_dense_all<dense::Bf16>();
  check_experts_all<MarlinOrder>();
  check_experts_all<RowMajorOrder>();
  for (int rows = 1; rows <= 8; rows++) check_layer(rows, rows % 2 ? 2880 : 1024, rows % 3 ? 128 : 32);
  for (int rows : {1, 2, 3, 4, 5, 8, 300})
    for (bool heads_first : {true, false}) {
      check_rotary(rows, 64, 8, heads_first);
      check_rotary(rows, 32, 4, heads_first);  // of two devices
      check_rotary(rows, 5, 3, heads_first);
    }
  time_dense_all<dense::Mxfp4>();
  time_dense_all<dense::Mxfp8>();
  time_dense_all<dense::Bf16>();
  time_experts_all<MarlinOrder>();
  time_experts_all<RowMajorOrder>();
  for (int rows : {1, 2, 4, 8}) time_layer(rows);
  for (int rows : {1, 2, 4, 8, 512, 2048}) time_rotary(rows);
  CHECK(cudaDeviceSynchronize());
  return all_right ? 0 : 1;
}
