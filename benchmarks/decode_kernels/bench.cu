// Checks the kernels of this folder against float64 and times them at gpt-oss-120b's shapes:
//   nvcc -O3 -std=c++17 -arch=sm_90a -o bench bench.cu && ./bench
// Times: median of 15, in a CUDA graph of 36 calls with dependent launches, over weights that no cache
// holds. They are of these kernels alone; no build of vLLM has them.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "dense.cuh"
#include "experts.cuh"

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

template <class FORMAT, int ROWS> void run_dense(cudaStream_t stream, dense::Operands o, bool wide) {
  constexpr int kWide = FORMAT::kParts == 1 ? 5 : FORMAT::kParts == 2 ? 3 : 2;  // tiles in flight
  constexpr int kNarrow = FORMAT::kParts == 4 ? 2 : 4;
  if (wide)
    launch(stream, dense::wide<FORMAT, 20, kWide, ROWS>, dim3(multiprocessors), 640, ROWS * (o.tiles * 64 + 32) * 2, o);
  else if (o.tiles > 48)
    launch(stream, dense::narrow<FORMAT, 16, kNarrow, ROWS>, dim3((o.n + 15) / 16), 512, 0, o);
  else
    launch(stream, dense::narrow<FORMAT, 12, kNarrow, ROWS>, dim3((o.n + 15) / 16), 384, 0, o);
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
      FORMAT::put(weights.data(), code, i, j, tiles);
      plain[(size_t)i * k + j] = Codes<FORMAT>::value(code) * (FORMAT::kScaled ? ldexp(1, (int)scales[(size_t)i * k / 32 + j / 32] - 127) : 1);
    }
  for (auto& v : x) v = __float2bfloat16(between(-2000, 2000, 1 / 500.f));
  for (auto& v : bias) v = __float2bfloat16(between(-1000, 1000, 1 / 100.f));
  for (auto& v : residual) v = __float2bfloat16(between(-1000, 1000, 1 / 10.f));
  Device<unsigned> w(weights);
  Device<unsigned char> s(packed);
  Device<bf16> dx(x), db(bias), dr(residual), out((size_t)ROWS * n);
  run_dense<FORMAT, ROWS>(0, {dx.data, (const uint4*)w.data, (const unsigned*)s.data, db.data, dr.data, out.data, n, tiles}, wide);
  const std::vector<bf16> got = out.read((size_t)ROWS * n);
  double worst = 0;
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
}

template <class FORMAT, int ROWS> void time_dense(const char* name, int n, int k, bool wide) {
  static Device<unsigned> weights((size_t)2 << 30), scales((size_t)1 << 27);
  static Device<bf16> x(8 * 8192), out((size_t)8 * 201088);
  static bool filled = false;
  if (!filled) {
    scatter<<<2048, 256>>>(weights.data, (size_t)2 << 30);
    CHECK(cudaMemset(scales.data, 120, (size_t)4 << 27));
    CHECK(cudaMemset(x.data, 0x3c, 8 * 8192 * 2));
    filled = true;
  }
  const int tiles = k / 64;
  const size_t words = (size_t)(n + 15) / 16 * tiles * 128 * FORMAT::kParts;
  const size_t copies = std::min<size_t>(36, ((size_t)2 << 30) / words);
  const float us = microseconds([&](cudaStream_t stream, int i) {
    const size_t at = i % copies * words;
    run_dense<FORMAT, ROWS>(stream, {x.data, (const uint4*)(weights.data + at), scales.data + at / 16 / FORMAT::kParts, x.data, nullptr, out.data, n, tiles}, wide);
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
}
template <class FORMAT> void time_dense_all() {
  time_dense_of<FORMAT, 1>();
  time_dense_of<FORMAT, 2>();
  time_dense_of<FORMAT, 4>();
  time_dense_of<FORMAT, 8>();
}

// -- experts ----------------------------------------------------------------------------------------

struct Experts {  // made-up weights of all experts, as Marlin keeps them and plain
  int count, k, n;
  std::vector<float> plain, plain_bias;
  Device<unsigned> weights;
  Device<unsigned char> scales;
  Device<bf16> bias;

  Experts(int count, int k, int n)
      : count(count), k(k), n(n), plain((size_t)count * k * n), plain_bias((size_t)count * n),
        weights((size_t)count * k * n / 8), scales((size_t)count * k / 32 * n), bias((size_t)count * n) {
    std::vector<unsigned> w((size_t)count * k * n / 8);
    std::vector<unsigned char> s((size_t)count * k / 32 * n);
    std::vector<bf16> b((size_t)count * n);
    auto exponent = [](int expert, int group, int column) { return 112 + (group * 7 + column * 3 + expert) % 9; };
    for (int e = 0; e < count; e++) {
      for (int group = 0; group < k / 32; group++)
        for (int i = 0; i < n; i++)
          s[((size_t)e * k / 32 + group) * n + i / 64 * 64 + experts::scale_at(i % 64)] = exponent(e, group, i);
      for (size_t at = 0; at < (size_t)k * n / 8; at++) {
        const int lane = at / 4 % 32, tile = at / 128 % (n / 64), tile_k = at / 128 / (n / 64);
        unsigned word = 0;
        for (int p = 0; p < 8; p++) {
          const unsigned code = dice() & 15;
          int row, column;
          experts::place(lane, at % 4, p, row, column);
          row += tile_k * 16;
          column += tile * 64;
          word |= code << (4 * p);
          plain[((size_t)e * k + row) * n + column] = value_of(code) * ldexp(1, exponent(e, row / 32, column) - 127);
        }
        w[(size_t)e * k * n / 8 + at] = word;
      }
      for (int i = 0; i < n; i++) {
        const bf16 v = __float2bfloat16(between(-100, 100, 1 / 100.f));
        plain_bias[(size_t)e * n + i] = __bfloat162float(v);
        b[(size_t)e * n + i / 32 * 32 + experts::bias_at(i % 32)] = v;
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

template <int ROWS> void run_gate_up(cudaStream_t stream, experts::Operands o) {
  constexpr int kTiles = ROWS >= 8 ? 2 : 1;
  launch(stream, experts::product<8, 2, kTiles, ROWS, true>, dim3((o.n / 64 + kTiles - 1) / kTiles, ROWS * experts::kTop), 256, ROWS * (o.k + 32) * 2, o);
}
template <int ROWS> void run_down(cudaStream_t stream, experts::Operands o) {
  launch(stream, experts::product<8, 2, 1, ROWS, false>, dim3(o.n / 64, ROWS * experts::kTop), 256, ROWS * (o.k + 32) * 2, o);
}

template <int ROWS> void check_experts(const Experts& gate_up, const Experts& down) {
  const int slots = ROWS * experts::kTop, inner = gate_up.n / 2;
  std::vector<bf16> x((size_t)ROWS * gate_up.k);
  std::vector<int> ids(slots);
  std::vector<float> shares(slots);
  for (auto& v : x) v = __float2bfloat16(between(-2000, 2000, 1 / 1000.f));
  for (int row = 0; row < ROWS; row++)  // four different ones a row, some of them also another row's
    for (int i = 0; i < experts::kTop; i++) ids[row * experts::kTop + i] = (row * 3 + i * 2 + (row == 5)) % gate_up.count;
  for (auto& v : shares) v = between(0, 1000, 1 / 1000.f);
  Device<bf16> dx(x), hidden((size_t)slots * inner);
  Device<int> di(ids);
  Device<float> ds(shares), sums((size_t)slots * down.n);
  CHECK(cudaMemset(hidden.data, 0xff, (size_t)slots * inner * 2));
  CHECK(cudaMemset(sums.data, 0xff, (size_t)slots * down.n * 4));
  run_gate_up<ROWS>(0, {dx.data, (const uint4*)gate_up.weights.data, gate_up.scales.data, gate_up.bias.data, di.data, ds.data, hidden.data, gate_up.k, gate_up.n});
  run_down<ROWS>(0, {hidden.data, (const uint4*)down.weights.data, down.scales.data, down.bias.data, di.data, ds.data, sums.data, inner, down.n});
  const std::vector<bf16> h = hidden.read((size_t)slots * inner);
  const std::vector<float> got = sums.read((size_t)slots * down.n);
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
    for (int i = 0; i < down.n; i++) {
      const double error = fabs(got[(size_t)slot * down.n + i] - shares[slot] * sum[i]);
      worst_down = std::max(worst_down, std::isnan(error) ? INFINITY : error / (shares[slot] * magnitude[i] + 1e-30));
    }
  }
  char what[64];
  snprintf(what, sizeof what, "gate_up, %d rows", ROWS);
  judge(what, worst_up, 2e-6);
  snprintf(what, sizeof what, "down, %d rows", ROWS);
  judge(what, worst_down, 2e-6);
}

template <int ROWS> void time_experts() {
  constexpr int kCount = 128, kLayers = 5, kHidden = 2880, kInner = 2944;  // Marlin's padding with the series
  constexpr size_t kUp = (size_t)kCount * kHidden * 2 * kInner / 8, kDown = (size_t)kCount * kInner * kHidden / 8;
  static Device<unsigned> up(kLayers * kUp), down(kLayers * kDown);
  static Device<unsigned char> up_scales(kLayers * kUp / 4), down_scales(kLayers * kDown / 4);
  static Device<bf16> x(8 * kHidden), hidden(32 * kInner), bias(kCount * 2 * kInner);
  static Device<float> shares(32), sums(32 * kHidden);
  static std::vector<int> chosen;
  if (chosen.empty()) {
    scatter<<<2048, 256>>>(up.data, kLayers * kUp);
    scatter<<<2048, 256>>>(down.data, kLayers * kDown);
    CHECK(cudaMemset(up_scales.data, 120, kLayers * kUp / 4));
    CHECK(cudaMemset(down_scales.data, 120, kLayers * kDown / 4));
    CHECK(cudaMemset(x.data, 0x3c, 8 * kHidden * 2));
    CHECK(cudaMemset(hidden.data, 0x3c, 32 * kInner * 2));
    CHECK(cudaMemset(bias.data, 0, kCount * 2 * kInner * 2));
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
    run_gate_up<ROWS>(stream, {x.data, (const uint4*)(up.data + l * kUp), up_scales.data + l * kUp / 4, bias.data, ids.data + i * 32, shares.data, hidden.data, kHidden, 2 * kInner});
  };
  auto down_call = [&](cudaStream_t stream, int i) {
    const size_t l = i % kLayers;
    run_down<ROWS>(stream, {hidden.data, (const uint4*)(down.data + l * kDown), down_scales.data + l * kDown / 4, bias.data, ids.data + i * 32, shares.data, sums.data, kInner, kHidden});
  };
  const float one = microseconds(gate_up), two = microseconds(down_call);
  const float both = microseconds([&](cudaStream_t stream, int i) {
    gate_up(stream, i);
    down_call(stream, i);
  });
  printf("experts, %d rows, %4.1f of 128 read: gate_up %7.2f us, down %6.2f us, in turn %7.2f us, %.2f TB/s\n", ROWS, distinct, one, two, both,
         distinct * 3 * kHidden * kInner * (.5 + 1 / 32.) / both / 1e6);
}

int main() {
  cudaDeviceProp device;
  CHECK(cudaGetDeviceProperties(&device, 0));
  multiprocessors = device.multiProcessorCount;
  printf("%s, %d.%d, %d multiprocessors\n", device.name, device.major, device.minor, multiprocessors);
  check_dense_all<dense::Mxfp4>();
  check_dense_all<dense::Mxfp8>();
  check_dense_all<dense::Bf16>();
  {
    const Experts gate_up(12, 320, 256), down(12, 128, 192);
    check_experts<1>(gate_up, down);
    check_experts<2>(gate_up, down);
    check_experts<3>(gate_up, down);
    check_experts<5>(gate_up, down);
    check_experts<8>(gate_up, down);
  }
  time_dense_all<dense::Mxfp4>();
  time_dense_all<dense::Mxfp8>();
  time_dense_all<dense::Bf16>();
  time_experts<1>();
  time_experts<2>();
  time_experts<4>();
  time_experts<8>();
  CHECK(cudaDeviceSynchronize());
  return all_right ? 0 : 1;
}
