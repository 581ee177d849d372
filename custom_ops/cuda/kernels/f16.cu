// Made from src/catalog.rs; a test compares the two.
#define MODULE "f16"

#include "parameters.cuh"
#include "attend.cuh"
#include "lists.cuh"
#include "output.cuh"
#include "project.cuh"
#include "volta.cuh"
#include "warpgroup.cuh"
#include "attend_warpgroup.cuh"
#include "persistent_layer.cuh"
#include "route_tokens.cuh"

KERNEL(moa_list_pairs, 1024, 1, list_pairs(p))
KERNEL(moa_sum_slots, 256, 1, sum_slots<binary16>(p))

#if HAS_TENSOR_CORES_16
KERNEL(moa_project_tensor_16x16, 256, 2, project<Tile<TensorCores<binary16>, 16, 16, 128, 1, 1, 8, 5>>(p))
KERNEL(moa_output_tensor_16x16, 256, 2, output<Tile<TensorCores<binary16>, 16, 16, 128, 1, 1, 8, 5>>(p))
static_assert(Tile<TensorCores<binary16>, 16, 16, 128, 1, 1, 8, 5>::SHARED_BYTES == 52480, "as the planner has it");
KERNEL(moa_project_tensor_16x64, 128, 2, project<Tile<TensorCores<binary16>, 16, 64, 64, 1, 1, 4, 6>>(p))
KERNEL(moa_output_tensor_16x64, 128, 2, output<Tile<TensorCores<binary16>, 16, 64, 64, 1, 1, 4, 6>>(p))
static_assert(Tile<TensorCores<binary16>, 16, 64, 64, 1, 1, 4, 6>::SHARED_BYTES == 69120, "as the planner has it");
KERNEL(moa_project_tensor_64x16, 128, 2, project<Tile<TensorCores<binary16>, 64, 16, 64, 1, 1, 4, 6>>(p))
KERNEL(moa_output_tensor_64x16, 128, 2, output<Tile<TensorCores<binary16>, 64, 16, 64, 1, 1, 4, 6>>(p))
static_assert(Tile<TensorCores<binary16>, 64, 16, 64, 1, 1, 4, 6>::SHARED_BYTES == 73728, "as the planner has it");
KERNEL(moa_project_tensor_64x64, 128, 3, project<Tile<TensorCores<binary16>, 64, 64, 64, 2, 2, 1, 4>>(p))
KERNEL(moa_output_tensor_64x64, 128, 3, output<Tile<TensorCores<binary16>, 64, 64, 64, 2, 2, 1, 4>>(p))
static_assert(Tile<TensorCores<binary16>, 64, 64, 64, 2, 2, 1, 4>::SHARED_BYTES == 73728, "as the planner has it");
KERNEL(moa_project_tensor_128x128, 256, 2, project<Tile<TensorCores<binary16>, 128, 128, 32, 2, 4, 1, 4>>(p))
KERNEL(moa_output_tensor_128x128, 256, 2, output<Tile<TensorCores<binary16>, 128, 128, 32, 2, 4, 1, 4>>(p))
static_assert(Tile<TensorCores<binary16>, 128, 128, 32, 2, 4, 1, 4>::SHARED_BYTES == 75776, "as the planner has it");
KERNEL(moa_attend_tensor_d64_r64, 128, 1, attend<Attention<TensorCores<binary16>, 64, 4, 1, 64>>(p))
static_assert(Attention<TensorCores<binary16>, 64, 4, 1, 64>::SHARED_BYTES == 27664, "as the planner has it");
KERNEL(moa_attend_tensor_d64_r16, 128, BLOCKS(3, 20752), attend<Attention<TensorCores<binary16>, 64, 1, 4, 64>>(p))
static_assert(Attention<TensorCores<binary16>, 64, 1, 4, 64>::SHARED_BYTES == 20752, "as the planner has it");
KERNEL(moa_attend_tensor_d128_r64, 128, 1, attend<Attention<TensorCores<binary16>, 128, 4, 1, 64>>(p))
static_assert(Attention<TensorCores<binary16>, 128, 4, 1, 64>::SHARED_BYTES == 52240, "as the planner has it");
KERNEL(moa_attend_tensor_d128_r16, 128, BLOCKS(3, 39184), attend<Attention<TensorCores<binary16>, 128, 1, 4, 64>>(p))
static_assert(Attention<TensorCores<binary16>, 128, 1, 4, 64>::SHARED_BYTES == 39184, "as the planner has it");
KERNEL(moa_attend_tensor_d256_r64, 128, 1, attend<Attention<TensorCores<binary16>, 256, 4, 1, 32>>(p))
static_assert(Attention<TensorCores<binary16>, 256, 4, 1, 32>::SHARED_BYTES == 67600, "as the planner has it");
KERNEL(moa_attend_tensor_d256_r16, 128, 1, attend<Attention<TensorCores<binary16>, 256, 1, 4, 64>>(p))
static_assert(Attention<TensorCores<binary16>, 256, 1, 4, 64>::SHARED_BYTES == 76048, "as the planner has it");
KERNEL(moa_attend_tensor_sticks_d64_r64, 128, 1, attend<Attention<TensorCores<binary16>, 64, 4, 1, 64, true>>(p))
static_assert(Attention<TensorCores<binary16>, 64, 4, 1, 64, true>::SHARED_BYTES == 27664, "as the planner has it");
KERNEL(moa_attend_tensor_sticks_d64_r16, 128, 1, attend<Attention<TensorCores<binary16>, 64, 1, 4, 64, true>>(p))
static_assert(Attention<TensorCores<binary16>, 64, 1, 4, 64, true>::SHARED_BYTES == 21008, "as the planner has it");
KERNEL(moa_attend_tensor_sticks_d128_r64, 128, 1, attend<Attention<TensorCores<binary16>, 128, 4, 1, 64, true>>(p))
static_assert(Attention<TensorCores<binary16>, 128, 4, 1, 64, true>::SHARED_BYTES == 52240, "as the planner has it");
KERNEL(moa_attend_tensor_sticks_d128_r16, 128, 1, attend<Attention<TensorCores<binary16>, 128, 1, 4, 64, true>>(p))
static_assert(Attention<TensorCores<binary16>, 128, 1, 4, 64, true>::SHARED_BYTES == 39440, "as the planner has it");
KERNEL(moa_attend_tensor_sticks_d256_r64, 128, 1, attend<Attention<TensorCores<binary16>, 256, 4, 1, 32, true>>(p))
static_assert(Attention<TensorCores<binary16>, 256, 4, 1, 32, true>::SHARED_BYTES == 67600, "as the planner has it");
KERNEL(moa_attend_tensor_sticks_d256_r16, 128, 1, attend<Attention<TensorCores<binary16>, 256, 1, 4, 64, true>>(p))
static_assert(Attention<TensorCores<binary16>, 256, 1, 4, 64, true>::SHARED_BYTES == 76304, "as the planner has it");
KERNEL(moa_route_tokens, 256, 1, route_many<binary16>(p))
#endif

#if HAS_WARPGROUP_PRODUCTS
KERNEL(moa_project_wgmma_64x128, 128, 2, project<WarpgroupTile<binary16, 64, 128, 4>>(p))
KERNEL(moa_output_wgmma_64x128, 128, 2, output<WarpgroupTile<binary16, 64, 128, 4>>(p))
static_assert(WarpgroupTile<binary16, 64, 128, 4>::SHARED_BYTES == 98304, "as the planner has it");
KERNEL(moa_project_wgmma_128x128, 256, 2, project<WarpgroupTile<binary16, 128, 128, 3>>(p))
KERNEL(moa_output_wgmma_128x128, 256, 2, output<WarpgroupTile<binary16, 128, 128, 3>>(p))
static_assert(WarpgroupTile<binary16, 128, 128, 3>::SHARED_BYTES == 98304, "as the planner has it");
KERNEL(moa_project_wgmma_128x256, 384, 1, project_tiles<PersistentTile<binary16, 128, 256, 4>>(p))
KERNEL(moa_output_wgmma_128x256, 384, 1, output_tiles<PersistentTile<binary16, 128, 256, 4>>(p))
static_assert(PersistentTile<binary16, 128, 256, 4>::SHARED_BYTES == 197704, "as the planner has it");
KERNEL(moa_attend_wgmma_d64_r128, 384, 1, attend_warpgroups<WarpgroupAttention<binary16, 64>>(p))
static_assert(WarpgroupAttention<binary16, 64>::SHARED_BYTES == 147704, "as the planner has it");
KERNEL(moa_attend_wgmma_d128_r128, 384, 1, attend_warpgroups<WarpgroupAttention<binary16, 128>>(p))
static_assert(WarpgroupAttention<binary16, 128>::SHARED_BYTES == 196768, "as the planner has it");
KERNEL(moa_attend_wgmma_d256_r128, 384, 1, attend_warpgroups<WarpgroupAttention<binary16, 256>>(p))
static_assert(WarpgroupAttention<binary16, 256>::SHARED_BYTES == 196736, "as the planner has it");
#endif

#if HAS_TURING_CORES
KERNEL(moa_project_turing_16x16, 256, 2, project<Tile<TensorCores<binary16, true>, 16, 16, 128, 1, 1, 8, 2>>(p))
KERNEL(moa_output_turing_16x16, 256, 2, output<Tile<TensorCores<binary16, true>, 16, 16, 128, 1, 1, 8, 2>>(p))
static_assert(Tile<TensorCores<binary16, true>, 16, 16, 128, 1, 1, 8, 2>::SHARED_BYTES == 20992, "as the planner has it");
KERNEL(moa_project_turing_16x64, 128, 2, project<Tile<TensorCores<binary16, true>, 16, 64, 64, 1, 1, 4, 2>>(p))
KERNEL(moa_output_turing_16x64, 128, 2, output<Tile<TensorCores<binary16, true>, 16, 64, 64, 1, 1, 4, 2>>(p))
static_assert(Tile<TensorCores<binary16, true>, 16, 64, 64, 1, 1, 4, 2>::SHARED_BYTES == 23040, "as the planner has it");
KERNEL(moa_project_turing_64x16, 128, 2, project<Tile<TensorCores<binary16, true>, 64, 16, 64, 1, 1, 4, 2>>(p))
KERNEL(moa_output_turing_64x16, 128, 2, output<Tile<TensorCores<binary16, true>, 64, 16, 64, 1, 1, 4, 2>>(p))
static_assert(Tile<TensorCores<binary16, true>, 64, 16, 64, 1, 1, 4, 2>::SHARED_BYTES == 24576, "as the planner has it");
KERNEL(moa_project_turing_64x64, 128, 3, project<Tile<TensorCores<binary16, true>, 64, 64, 64, 2, 2, 1, 2>>(p))
KERNEL(moa_output_turing_64x64, 128, 3, output<Tile<TensorCores<binary16, true>, 64, 64, 64, 2, 2, 1, 2>>(p))
static_assert(Tile<TensorCores<binary16, true>, 64, 64, 64, 2, 2, 1, 2>::SHARED_BYTES == 36864, "as the planner has it");
KERNEL(moa_attend_turing_d64_r64, 128, 1, attend<Attention<TensorCores<binary16, true>, 64, 4, 1, 64>>(p))
static_assert(Attention<TensorCores<binary16, true>, 64, 4, 1, 64>::SHARED_BYTES == 27664, "as the planner has it");
KERNEL(moa_attend_turing_d64_r16, 128, 1, attend<Attention<TensorCores<binary16, true>, 64, 1, 4, 64>>(p))
static_assert(Attention<TensorCores<binary16, true>, 64, 1, 4, 64>::SHARED_BYTES == 20752, "as the planner has it");
KERNEL(moa_attend_turing_d128_r64, 128, 1, attend<Attention<TensorCores<binary16, true>, 128, 4, 1, 64>>(p))
static_assert(Attention<TensorCores<binary16, true>, 128, 4, 1, 64>::SHARED_BYTES == 52240, "as the planner has it");
KERNEL(moa_attend_turing_d128_r16, 128, 1, attend<Attention<TensorCores<binary16, true>, 128, 1, 4, 64>>(p))
static_assert(Attention<TensorCores<binary16, true>, 128, 1, 4, 64>::SHARED_BYTES == 39184, "as the planner has it");
KERNEL(moa_attend_turing_d256_r32, 64, 1, attend<Attention<TensorCores<binary16, true>, 256, 2, 1, 32>>(p))
static_assert(Attention<TensorCores<binary16, true>, 256, 2, 1, 32>::SHARED_BYTES == 50704, "as the planner has it");
KERNEL(moa_attend_turing_d256_r16, 64, 1, attend<Attention<TensorCores<binary16, true>, 256, 1, 2, 32>>(p))
static_assert(Attention<TensorCores<binary16, true>, 256, 1, 2, 32>::SHARED_BYTES == 42256, "as the planner has it");
KERNEL(moa_attend_turing_sticks_d64_r64, 128, 1, attend<Attention<TensorCores<binary16, true>, 64, 4, 1, 64, true>>(p))
static_assert(Attention<TensorCores<binary16, true>, 64, 4, 1, 64, true>::SHARED_BYTES == 27664, "as the planner has it");
KERNEL(moa_attend_turing_sticks_d64_r16, 128, 1, attend<Attention<TensorCores<binary16, true>, 64, 1, 4, 64, true>>(p))
static_assert(Attention<TensorCores<binary16, true>, 64, 1, 4, 64, true>::SHARED_BYTES == 21008, "as the planner has it");
KERNEL(moa_attend_turing_sticks_d128_r64, 128, 1, attend<Attention<TensorCores<binary16, true>, 128, 4, 1, 64, true>>(p))
static_assert(Attention<TensorCores<binary16, true>, 128, 4, 1, 64, true>::SHARED_BYTES == 52240, "as the planner has it");
KERNEL(moa_attend_turing_sticks_d128_r16, 128, 1, attend<Attention<TensorCores<binary16, true>, 128, 1, 4, 64, true>>(p))
static_assert(Attention<TensorCores<binary16, true>, 128, 1, 4, 64, true>::SHARED_BYTES == 39440, "as the planner has it");
KERNEL(moa_attend_turing_sticks_d256_r32, 64, 1, attend<Attention<TensorCores<binary16, true>, 256, 2, 1, 32, true>>(p))
static_assert(Attention<TensorCores<binary16, true>, 256, 2, 1, 32, true>::SHARED_BYTES == 50704, "as the planner has it");
KERNEL(moa_attend_turing_sticks_d256_r16, 64, 1, attend<Attention<TensorCores<binary16, true>, 256, 1, 2, 32, true>>(p))
static_assert(Attention<TensorCores<binary16, true>, 256, 1, 2, 32, true>::SHARED_BYTES == 42384, "as the planner has it");
#endif

#if HAS_VOLTA_CORES
KERNEL(moa_project_volta_16x16, 256, 2, project<Tile<VoltaCores, 16, 16, 128, 1, 1, 8, 2>>(p))
KERNEL(moa_output_volta_16x16, 256, 2, output<Tile<VoltaCores, 16, 16, 128, 1, 1, 8, 2>>(p))
static_assert(Tile<VoltaCores, 16, 16, 128, 1, 1, 8, 2>::SHARED_BYTES == 20992, "as the planner has it");
KERNEL(moa_project_volta_16x64, 128, 2, project<Tile<VoltaCores, 16, 64, 64, 1, 1, 4, 2>>(p))
KERNEL(moa_output_volta_16x64, 128, 2, output<Tile<VoltaCores, 16, 64, 64, 1, 1, 4, 2>>(p))
static_assert(Tile<VoltaCores, 16, 64, 64, 1, 1, 4, 2>::SHARED_BYTES == 23040, "as the planner has it");
KERNEL(moa_project_volta_64x16, 128, 2, project<Tile<VoltaCores, 64, 16, 64, 1, 1, 4, 2>>(p))
KERNEL(moa_output_volta_64x16, 128, 2, output<Tile<VoltaCores, 64, 16, 64, 1, 1, 4, 2>>(p))
static_assert(Tile<VoltaCores, 64, 16, 64, 1, 1, 4, 2>::SHARED_BYTES == 24576, "as the planner has it");
KERNEL(moa_project_volta_64x64, 128, 3, project<Tile<VoltaCores, 64, 64, 64, 2, 2, 1, 2>>(p))
KERNEL(moa_output_volta_64x64, 128, 3, output<Tile<VoltaCores, 64, 64, 64, 2, 2, 1, 2>>(p))
static_assert(Tile<VoltaCores, 64, 64, 64, 2, 2, 1, 2>::SHARED_BYTES == 36864, "as the planner has it");
KERNEL(moa_project_volta_128x128, 256, 1, project<Tile<VoltaCores, 128, 128, 32, 2, 4, 1, 2>>(p))
KERNEL(moa_output_volta_128x128, 256, 1, output<Tile<VoltaCores, 128, 128, 32, 2, 4, 1, 2>>(p))
static_assert(Tile<VoltaCores, 128, 128, 32, 2, 4, 1, 2>::SHARED_BYTES == 67584, "as the planner has it");
KERNEL(moa_attend_volta_d64_r64, 128, 1, attend<Attention<VoltaCores, 64, 4, 1, 64>>(p))
static_assert(Attention<VoltaCores, 64, 4, 1, 64>::SHARED_BYTES == 27664, "as the planner has it");
KERNEL(moa_attend_volta_d64_r16, 128, 1, attend<Attention<VoltaCores, 64, 1, 4, 64>>(p))
static_assert(Attention<VoltaCores, 64, 1, 4, 64>::SHARED_BYTES == 20752, "as the planner has it");
KERNEL(moa_attend_volta_d128_r64, 128, 1, attend<Attention<VoltaCores, 128, 4, 1, 32>>(p))
static_assert(Attention<VoltaCores, 128, 4, 1, 32>::SHARED_BYTES == 34832, "as the planner has it");
KERNEL(moa_attend_volta_d128_r16, 128, 1, attend<Attention<VoltaCores, 128, 1, 4, 64>>(p))
static_assert(Attention<VoltaCores, 128, 1, 4, 64>::SHARED_BYTES == 39184, "as the planner has it");
KERNEL(moa_attend_volta_d256_r64, 128, 1, attend<Attention<VoltaCores, 256, 4, 1, 16>>(p))
static_assert(Attention<VoltaCores, 256, 4, 1, 16>::SHARED_BYTES == 50704, "as the planner has it");
KERNEL(moa_attend_volta_d256_r16, 64, 1, attend<Attention<VoltaCores, 256, 1, 2, 32>>(p))
static_assert(Attention<VoltaCores, 256, 1, 2, 32>::SHARED_BYTES == 42256, "as the planner has it");
KERNEL(moa_attend_volta_sticks_d64_r64, 128, 1, attend<Attention<VoltaCores, 64, 4, 1, 64, true>>(p))
static_assert(Attention<VoltaCores, 64, 4, 1, 64, true>::SHARED_BYTES == 27664, "as the planner has it");
KERNEL(moa_attend_volta_sticks_d64_r16, 128, 1, attend<Attention<VoltaCores, 64, 1, 4, 64, true>>(p))
static_assert(Attention<VoltaCores, 64, 1, 4, 64, true>::SHARED_BYTES == 21008, "as the planner has it");
KERNEL(moa_attend_volta_sticks_d128_r64, 128, 1, attend<Attention<VoltaCores, 128, 4, 1, 32, true>>(p))
static_assert(Attention<VoltaCores, 128, 4, 1, 32, true>::SHARED_BYTES == 34832, "as the planner has it");
KERNEL(moa_attend_volta_sticks_d128_r16, 128, 1, attend<Attention<VoltaCores, 128, 1, 4, 64, true>>(p))
static_assert(Attention<VoltaCores, 128, 1, 4, 64, true>::SHARED_BYTES == 39440, "as the planner has it");
KERNEL(moa_attend_volta_sticks_d256_r64, 128, 1, attend<Attention<VoltaCores, 256, 4, 1, 16, true>>(p))
static_assert(Attention<VoltaCores, 256, 4, 1, 16, true>::SHARED_BYTES == 50704, "as the planner has it");
KERNEL(moa_attend_volta_sticks_d256_r16, 64, 1, attend<Attention<VoltaCores, 256, 1, 2, 32, true>>(p))
static_assert(Attention<VoltaCores, 256, 1, 2, 32, true>::SHARED_BYTES == 42384, "as the planner has it");
#endif
