// Runs FlashInfer's real MoE dispatch on the CPU and prints what it would launch.
//
// usage: probe CAPABILITY, for example 121
//
// The two kinds of launcher, which hold the device code, are replaced by functions that print
// their template arguments; the CUDA runtime by probe_fake_cudart.cpp, which answers with the capability.
// Everything between is the release's: tactics, heuristic, traits, architecture and tile switches.
// Of types without a tactic on SM12x only the number of their tactics is printed.

#include <cstdio>
#include <cstdlib>
#include <string>

#include "tensorrt_llm/kernels/cutlass_kernels/moe_gemm/moe_gemm_template_dispatch.h"

extern int fake_capability;  // probe_fake_cudart.cpp
static bool quiet = false;

using tensorrt_llm::kernels::cutlass_kernels::GroupedGemmInput;
using tensorrt_llm::kernels::cutlass_kernels::MoeGemmRunner;
using tensorrt_llm::kernels::cutlass_kernels::TmaWarpSpecializedGroupedGemmInput;
using Fusion = TmaWarpSpecializedGroupedGemmInput::EpilogueFusion;
using FP8 = __nv_fp8_e4m3;
using FP4 = tensorrt_llm::kernels::cutlass_kernels::Fp4Type;
using INT4 = cutlass::uint4b_t;

namespace tensorrt_llm::kernels::cutlass_kernels_oss {

template <typename Arch, typename T, typename WeightType, typename OutputType,
          typename EpilogueSchedule, typename EpilogueTag, Fusion FUSION, typename TileShape,
          typename ClusterShape, bool IsMXFPX, bool DYNAMIC_CGA, bool BIAS, bool SwapAB>
void tma_warp_specialized_generic_moe_gemm_kernelLauncher(
    TmaWarpSpecializedGroupedGemmInput, int, int, cudaStream_t, int*, size_t* workspace_size,
    cute::Shape<int32_t, int32_t, cute::_1>, cute::Shape<int32_t, int32_t, cute::_1>) {
  if (workspace_size != nullptr) *workspace_size = 0;
  if (quiet) return;
  std::printf(
      " sm%d fp%dxfp%d out%s %dx%dx%d %s mx%d swap%d", Arch::kMinComputeCapability,
      std::is_same_v<T, FP8> ? 8 : 4, std::is_same_v<WeightType, FP8> ? 8 : 4,
      std::is_same_v<OutputType, half> ? "F16" : "BF16",
      (int)cute::size<0>(TileShape{}), (int)cute::size<1>(TileShape{}),
      (int)cute::size<2>(TileShape{}), FUSION == Fusion::FINALIZE ? "FINALIZE" : "NONE", IsMXFPX,
      SwapAB);
}

#define ELSEWHERE(OUT, ARCH)                                                                      \
  template <>                                                                                     \
  void dispatchMoeGemmToCutlass<FP8, FP8, OUT, cutlass::arch::ARCH,                               \
                                tensorrt_llm::cutlass_extensions::EpilogueOpDefault>(             \
      GroupedGemmInput<FP8, FP8, OUT, OUT>, int) {                                                \
    std::printf(" " #ARCH " per-tensor");                                                         \
  }
ELSEWHERE(__nv_bfloat16, Sm75)
ELSEWHERE(__nv_bfloat16, Sm89)
ELSEWHERE(half, Sm75)
ELSEWHERE(half, Sm89)
#undef ELSEWHERE

}  // namespace tensorrt_llm::kernels::cutlass_kernels_oss

// Every tactic of a runner, one a line: its kind, its occupancy, and what its dispatch launches.
template <typename T, typename WeightType, typename OutputType, bool IsMXFPX>
void walk(char const* name) {
  MoeGemmRunner<T, WeightType, OutputType, OutputType, IsMXFPX> runner;
  std::printf("%s supports_tma_ws %d\n", name, runner.supportsTmaWarpSpecialized());
  for (auto const& config : runner.getConfigs(true)) {
    bool const finalize =
        config.epilogue_fusion_type ==
        tensorrt_llm::cutlass_extensions::CutlassGemmConfig::EpilogueFusionType::FINALIZE;
    GroupedGemmInput<T, WeightType, OutputType, OutputType> inputs{};
    inputs.gemm_config = config;
    inputs.n = 256;
    TmaWarpSpecializedGroupedGemmInput tma{};
    void const* anything = &tma;
    if (config.is_tma_warp_specialized) {
      // what CutlassMoeFCRunner sets for such a tactic
      tma.stride_act = &tma;
      tma.ptr_act = &anything;
      tma.swap_ab = config.swap_ab;
      tma.fusion = finalize ? Fusion::FINALIZE : Fusion::NONE;
      using Scaling = TmaWarpSpecializedGroupedGemmInput::FpXBlockScalingType;
      tma.fpX_block_scaling_type = std::is_same_v<T, FP4>                     ? Scaling::NVFP4
                                   : IsMXFPX || !std::is_same_v<T, WeightType> ? Scaling::MXFPX
                                                                               : Scaling::NONE;
    }
    // the autotuner drops what has no occupancy; of the SM89 kernels only their code would tell
    quiet = true;
    int const occupancy =
        config.is_tma_warp_specialized ? runner.queryOccupancyForConfig(config) : 0;
    quiet = false;
    std::printf("%s tactic %s %d:", name, config.is_tma_warp_specialized ? "tma_ws" : "ampere",
                occupancy);
    try {
      runner.moeGemm(inputs, tma);
    } catch (std::exception const& error) {
      std::string const text = error.what();
      std::printf(" refused");
      std::fprintf(stderr, "%s\n", text.c_str());
    }
    std::printf("\n");
  }
}

template <typename T, typename WeightType, typename OutputType>
void count(char const* name) {
  auto const tactics =
      MoeGemmRunner<T, WeightType, OutputType>::getConfigs(fake_capability, true).size();
  std::printf("%s tactics %d\n", name, (int)tactics);
}

int main(int argc, char** argv) {
  fake_capability = argc == 2 ? std::atoi(argv[1]) : 0;
  if (fake_capability < 80) return 2;
  walk<FP8, FP8, __nv_bfloat16, true>("mxfp8-bf16");
  walk<FP8, FP8, half, true>("mxfp8-f16");
  walk<FP8, FP8, __nv_bfloat16, false>("fp8-bf16");
  walk<FP8, FP8, half, false>("fp8-f16");
  walk<FP8, FP4, __nv_bfloat16, false>("mxfp8xmxfp4-bf16");
  walk<FP8, FP4, half, false>("mxfp8xmxfp4-f16");
  walk<FP4, FP4, __nv_bfloat16, false>("nvfp4-bf16");
  walk<FP4, FP4, half, false>("nvfp4-f16");
  count<FP8, INT4, __nv_bfloat16>("fp8_uint4");
  count<__nv_bfloat16, FP4, __nv_bfloat16>("bf16_fp4");
  count<half, FP4, half>("fp16_fp4");
  count<__nv_bfloat16, INT4, __nv_bfloat16>("bf16_uint4");
  count<half, half, half>("fp16_fp16");
  return 0;
}
