// Writes the dynamic shared memory of each CUTLASS kernel into its name, where a cubin tells it:
// the kernel template gets the size as a second parameter. Its body is CUTLASS's own, so the
// machine code is the same.
#pragma once

#include "cutlass/device_kernel.h"

namespace cutlass {

template <typename Operator, int SharedBytes = static_cast<int>(Operator::SharedStorageSize)>
CUTLASS_GLOBAL
__launch_bounds__(Operator::MaxThreadsPerBlock, Operator::MinBlocksPerMultiprocessor)
void sparkforge_device_kernel(CUTLASS_GRID_CONSTANT typename Operator::Params const params) {
  extern __shared__ char smem[];
  Operator op;
  op(params, smem);
  cutlass::arch::synclog_print();
}

}  // namespace cutlass

#define device_kernel sparkforge_device_kernel
