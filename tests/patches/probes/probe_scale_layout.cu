// Where CUTLASS and FlashInfer put a block scale: prints both, computed on the CPU by their code.
//
// usage: probe ROWS COLUMNS_OF_SCALES; a line for each scale:
// row, column, offset as activations (A), as weights (B), as FlashInfer's quantiser writes it

#include <cstdio>
#include <cstdlib>

#include "cutlass/detail/sm100_blockscaled_layout.hpp"
#include "tensorrt_llm/kernels/quantization_utils.cuh"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  int const rows = std::atoi(argv[1]), columns = std::atoi(argv[2]);
  // what TmaWarpSpecializedGroupedGemmInput::MXFPXBlockScaledConfig is
  using Config = cutlass::detail::Sm1xxBlockScaledConfig<32>;
  int const k = columns * 32;
  auto const a = Config::tile_atom_to_shape_SFA(cute::make_shape(rows, 1, k, 1));
  auto const b = Config::tile_atom_to_shape_SFB(cute::make_shape(1, rows, k, 1));
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < columns; ++column) {
      int const first = column * 32, last = first + 31;  // one scale for these
      if (a(row, first, 0) != a(row, last, 0)) return 3;
      std::printf("%d %d %d %d %d\n", row, column, int(a(row, first, 0)), int(b(row, first, 0)),
                  int(tensorrt_llm::kernels::get_sf_out_offset_128x4(row, column, columns)));
    }
  }
  return 0;
}
