// One block-scaled product of 16x8x32 MXFP8 numbers: the smallest kernel that has what this project
// is about. Guarded as CUTLASS guards its own, so that a target without the instruction gets an
// empty kernel and no error.
#include <cstdint>

extern "C" __global__ void block_scaled(float* d, uint32_t const* a, uint32_t const* b,
                                        uint8_t const* scales) {
#if defined(__CUDA_ARCH_FEAT_SM120_ALL) || defined(__CUDA_ARCH_FEAT_SM121_ALL) || \
    (defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ / 100 == 12)
  uint32_t const scale_a = scales[threadIdx.x], scale_b = scales[threadIdx.x + 32];
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X"
      ".f32.e4m3.e4m3.f32.ue8m0 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {0, 0}, {%11}, "
      "{0, 0};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a),
        "r"(scale_b));
#else
  asm volatile("trap;");
#endif
}
