// The kernels behind C functions, for ../decode_in_vllm.py. Each returns a cudaError_t; pointers are to the device.
#include "dense.cuh"
#include "experts.cuh"

namespace {

// A row's four experts in one: the last kernel of the experts.
__global__ void combine(const float* sums, const int* ids, bf16* out, int n) {
  take_turn();
  const int i = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
  if (i >= n) return;
  float sum = 0;
#pragma unroll
  for (int slot = row * experts::kTop; slot < (row + 1) * experts::kTop; slot++)
    if (ids[slot] >= 0) sum += sums[(size_t)slot * n + i];
  out[(size_t)row * n + i] = __float2bfloat16(sum);
}

template <class Kernel, class... Arguments>
int launch(void* stream, Kernel kernel, dim3 grid, int threads, int shared, Arguments... arguments) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

int multiprocessors() {
  static const int count = [] {
    int device = 0, value = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, device);
    return value;
  }();
  return count;
}

template <int ROWS> int run(void* stream, dense::Operands o) {
  using F = dense::Mxfp4;
  if (o.n > 65536) {
    const int shared = ROWS * (o.tiles * 64 + 32) * 2;
    return launch(stream, dense::wide<F, 20, 5, ROWS>, dim3(multiprocessors()), 640, shared, o);
  }
  const dim3 grid((o.n + 15) / 16);
  if (o.tiles > 48) return launch(stream, dense::narrow<F, 16, 4, ROWS>, grid, 512, 0, o);
  return launch(stream, dense::narrow<F, 12, 4, ROWS>, grid, 384, 0, o);
}

template <int ROWS> int run(void* stream, experts::Operands up, experts::Operands down, bf16* out) {
  using namespace experts;
  constexpr int kTiles = ROWS >= 8 ? 2 : 1, kSlots = ROWS * kTop;
  int error = launch(stream, product<8, 2, kTiles, ROWS, true>, dim3((up.n / 64 + kTiles - 1) / kTiles, kSlots),
                     256, ROWS * (up.k + 32) * 2, up);
  if (!error)
    error = launch(stream, product<8, 2, 1, ROWS, false>, dim3(down.n / 64, kSlots), 256,
                   ROWS * (down.k + 32) * 2, down);
  if (!error)
    error = launch(stream, combine, dim3((down.n + 255) / 256, ROWS), 256, 0,
                   static_cast<const float*>(down.out), down.ids, out, down.n);
  return error;
}

template <class... Arguments> int run_rows(int rows, Arguments... arguments) {
  switch (rows) {
    case 1: return run<1>(arguments...);
    case 2: return run<2>(arguments...);
    case 3: return run<3>(arguments...);
    case 4: return run<4>(arguments...);
    case 5: return run<5>(arguments...);
    case 6: return run<6>(arguments...);
    case 7: return run<7>(arguments...);
    case 8: return run<8>(arguments...);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

extern "C" int dense_mxfp4(void* stream, int rows, int n, int k, const bf16* x, const uint4* weights,
                           const unsigned* scales, const bf16* bias, bf16* out) {
  return run_rows(rows, stream, dense::Operands{x, weights, scales, bias, nullptr, out, n, k / 64});
}

// hidden: BF16 [4 * rows][inner], sums: float [4 * rows][k], both scratch.
extern "C" int moe_mxfp4(void* stream, int rows, int k, int inner, const bf16* x, const uint4* up,
                         const unsigned char* up_scales, const bf16* up_bias, const uint4* down,
                         const unsigned char* down_scales, const bf16* down_bias, const int* ids,
                         const float* shares, bf16* hidden, float* sums, bf16* out) {
  const experts::Operands first{x, up, up_scales, up_bias, ids, shares, hidden, k, 2 * inner};
  const experts::Operands second{hidden, down, down_scales, down_bias, ids, shares, sums, inner, k};
  return run_rows(rows, stream, first, second, out);
}
