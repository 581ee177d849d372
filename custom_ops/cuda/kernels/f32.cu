// Made from src/catalog.rs; a test compares the two.
#define MODULE "f32"

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
KERNEL(moa_sum_slots, 256, 1, sum_slots<float>(p))

#if HAS_TENSOR_CORES_TF32
KERNEL(moa_project_tf32_16x16, 256, 2, project<Tile<Tf32Cores, 16, 16, 64, 1, 1, 8, 4>>(p))
KERNEL(moa_output_tf32_16x16, 256, 2, output<Tile<Tf32Cores, 16, 16, 64, 1, 1, 8, 4>>(p))
static_assert(Tile<Tf32Cores, 16, 16, 64, 1, 1, 8, 4>::SHARED_BYTES == 41984, "as the planner has it");
KERNEL(moa_project_tf32_16x64, 128, 2, project<Tile<Tf32Cores, 16, 64, 32, 1, 1, 4, 4>>(p))
KERNEL(moa_output_tf32_16x64, 128, 2, output<Tile<Tf32Cores, 16, 64, 32, 1, 1, 4, 4>>(p))
static_assert(Tile<Tf32Cores, 16, 64, 32, 1, 1, 4, 4>::SHARED_BYTES == 46080, "as the planner has it");
KERNEL(moa_project_tf32_64x16, 128, 2, project<Tile<Tf32Cores, 64, 16, 32, 1, 1, 4, 4>>(p))
KERNEL(moa_output_tf32_64x16, 128, 2, output<Tile<Tf32Cores, 64, 16, 32, 1, 1, 4, 4>>(p))
static_assert(Tile<Tf32Cores, 64, 16, 32, 1, 1, 4, 4>::SHARED_BYTES == 49152, "as the planner has it");
KERNEL(moa_project_tf32_64x64, 128, 3, project<Tile<Tf32Cores, 64, 64, 32, 2, 2, 1, 4>>(p))
KERNEL(moa_output_tf32_64x64, 128, 3, output<Tile<Tf32Cores, 64, 64, 32, 2, 2, 1, 4>>(p))
static_assert(Tile<Tf32Cores, 64, 64, 32, 2, 2, 1, 4>::SHARED_BYTES == 73728, "as the planner has it");
KERNEL(moa_project_tf32_128x128, 256, 2, project<Tile<Tf32Cores, 128, 128, 16, 2, 4, 1, 4>>(p))
KERNEL(moa_output_tf32_128x128, 256, 2, output<Tile<Tf32Cores, 128, 128, 16, 2, 4, 1, 4>>(p))
static_assert(Tile<Tf32Cores, 128, 128, 16, 2, 4, 1, 4>::SHARED_BYTES == 75776, "as the planner has it");
KERNEL(moa_attend_tf32_d64_r64, 128, 1, attend<Attention<Tf32Cores, 64, 4, 1, 64>>(p))
static_assert(Attention<Tf32Cores, 64, 4, 1, 64>::SHARED_BYTES == 53264, "as the planner has it");
KERNEL(moa_attend_tf32_d64_r16, 128, 1, attend<Attention<Tf32Cores, 64, 1, 4, 32>>(p))
static_assert(Attention<Tf32Cores, 64, 1, 4, 32>::SHARED_BYTES == 22288, "as the planner has it");
KERNEL(moa_attend_tf32_d128_r64, 128, 1, attend<Attention<Tf32Cores, 128, 4, 1, 32>>(p))
static_assert(Attention<Tf32Cores, 128, 4, 1, 32>::SHARED_BYTES == 68112, "as the planner has it");
KERNEL(moa_attend_tf32_d128_r16, 128, 1, attend<Attention<Tf32Cores, 128, 1, 4, 32>>(p))
static_assert(Attention<Tf32Cores, 128, 1, 4, 32>::SHARED_BYTES == 42768, "as the planner has it");
KERNEL(moa_attend_tf32_d256_r32, 64, 1, attend<Attention<Tf32Cores, 256, 2, 1, 16>>(p))
static_assert(Attention<Tf32Cores, 256, 2, 1, 16>::SHARED_BYTES == 66832, "as the planner has it");
KERNEL(moa_attend_tf32_d256_r16, 64, 1, attend<Attention<Tf32Cores, 256, 1, 2, 16>>(p))
static_assert(Attention<Tf32Cores, 256, 1, 2, 16>::SHARED_BYTES == 50192, "as the planner has it");
KERNEL(moa_attend_tf32_sticks_d64_r64, 128, 1, attend<Attention<Tf32Cores, 64, 4, 1, 64, true>>(p))
static_assert(Attention<Tf32Cores, 64, 4, 1, 64, true>::SHARED_BYTES == 53264, "as the planner has it");
KERNEL(moa_attend_tf32_sticks_d64_r16, 128, 1, attend<Attention<Tf32Cores, 64, 1, 4, 32, true>>(p))
static_assert(Attention<Tf32Cores, 64, 1, 4, 32, true>::SHARED_BYTES == 22544, "as the planner has it");
KERNEL(moa_attend_tf32_sticks_d128_r64, 128, 1, attend<Attention<Tf32Cores, 128, 4, 1, 32, true>>(p))
static_assert(Attention<Tf32Cores, 128, 4, 1, 32, true>::SHARED_BYTES == 68112, "as the planner has it");
KERNEL(moa_attend_tf32_sticks_d128_r16, 128, 1, attend<Attention<Tf32Cores, 128, 1, 4, 32, true>>(p))
static_assert(Attention<Tf32Cores, 128, 1, 4, 32, true>::SHARED_BYTES == 43024, "as the planner has it");
KERNEL(moa_attend_tf32_sticks_d256_r32, 64, 1, attend<Attention<Tf32Cores, 256, 2, 1, 16, true>>(p))
static_assert(Attention<Tf32Cores, 256, 2, 1, 16, true>::SHARED_BYTES == 66832, "as the planner has it");
KERNEL(moa_attend_tf32_sticks_d256_r16, 64, 1, attend<Attention<Tf32Cores, 256, 1, 2, 16, true>>(p))
static_assert(Attention<Tf32Cores, 256, 1, 2, 16, true>::SHARED_BYTES == 50320, "as the planner has it");
#endif

#if 1
KERNEL(moa_project_plain_16x16, 256, 2, project<Tile<PlainUnits<float>, 16, 16, 64, 1, 1, 8, 4>>(p))
KERNEL(moa_output_plain_16x16, 256, 2, output<Tile<PlainUnits<float>, 16, 16, 64, 1, 1, 8, 4>>(p))
static_assert(Tile<PlainUnits<float>, 16, 16, 64, 1, 1, 8, 4>::SHARED_BYTES == 37888, "as the planner has it");
KERNEL(moa_project_plain_16x64, 128, 2, project<Tile<PlainUnits<float>, 16, 64, 32, 1, 1, 4, 4>>(p))
KERNEL(moa_output_plain_16x64, 128, 2, output<Tile<PlainUnits<float>, 16, 64, 32, 1, 1, 4, 4>>(p))
static_assert(Tile<PlainUnits<float>, 16, 64, 32, 1, 1, 4, 4>::SHARED_BYTES == 44032, "as the planner has it");
KERNEL(moa_project_plain_64x16, 128, 2, project<Tile<PlainUnits<float>, 64, 16, 32, 1, 1, 4, 4>>(p))
KERNEL(moa_output_plain_64x16, 128, 2, output<Tile<PlainUnits<float>, 64, 16, 32, 1, 1, 4, 4>>(p))
static_assert(Tile<PlainUnits<float>, 64, 16, 32, 1, 1, 4, 4>::SHARED_BYTES == 47104, "as the planner has it");
KERNEL(moa_project_plain_64x64, 128, 3, project<Tile<PlainUnits<float>, 64, 64, 32, 2, 2, 1, 4>>(p))
KERNEL(moa_output_plain_64x64, 128, 3, output<Tile<PlainUnits<float>, 64, 64, 32, 2, 2, 1, 4>>(p))
static_assert(Tile<PlainUnits<float>, 64, 64, 32, 2, 2, 1, 4>::SHARED_BYTES == 71680, "as the planner has it");
KERNEL(moa_project_plain_128x128, 256, 1, project<Tile<PlainUnits<float>, 128, 128, 16, 2, 4, 1, 4>>(p))
KERNEL(moa_output_plain_128x128, 256, 1, output<Tile<PlainUnits<float>, 128, 128, 16, 2, 4, 1, 4>>(p))
static_assert(Tile<PlainUnits<float>, 128, 128, 16, 2, 4, 1, 4>::SHARED_BYTES == 74752, "as the planner has it");
KERNEL(moa_attend_plain_d64_r64, 128, 1, attend<Attention<PlainUnits<float>, 64, 4, 1, 32>>(p))
static_assert(Attention<PlainUnits<float>, 64, 4, 1, 32>::SHARED_BYTES == 44048, "as the planner has it");
KERNEL(moa_attend_plain_d64_r16, 128, 1, attend<Attention<PlainUnits<float>, 64, 1, 4, 32>>(p))
static_assert(Attention<PlainUnits<float>, 64, 1, 4, 32>::SHARED_BYTES == 24848, "as the planner has it");
KERNEL(moa_attend_plain_d128_r32, 64, 1, attend<Attention<PlainUnits<float>, 128, 2, 1, 32>>(p))
static_assert(Attention<PlainUnits<float>, 128, 2, 1, 32>::SHARED_BYTES == 55312, "as the planner has it");
KERNEL(moa_attend_plain_d128_r16, 128, 1, attend<Attention<PlainUnits<float>, 128, 1, 4, 32>>(p))
static_assert(Attention<PlainUnits<float>, 128, 1, 4, 32>::SHARED_BYTES == 45328, "as the planner has it");
KERNEL(moa_attend_plain_d256_r32, 64, 1, attend<Attention<PlainUnits<float>, 256, 2, 1, 16>>(p))
static_assert(Attention<PlainUnits<float>, 256, 2, 1, 16>::SHARED_BYTES == 69136, "as the planner has it");
KERNEL(moa_attend_plain_d256_r16, 64, 1, attend<Attention<PlainUnits<float>, 256, 1, 2, 16>>(p))
static_assert(Attention<PlainUnits<float>, 256, 1, 2, 16>::SHARED_BYTES == 51472, "as the planner has it");
KERNEL(moa_attend_plain_sticks_d64_r64, 128, 1, attend<Attention<PlainUnits<float>, 64, 4, 1, 32, true>>(p))
static_assert(Attention<PlainUnits<float>, 64, 4, 1, 32, true>::SHARED_BYTES == 44048, "as the planner has it");
KERNEL(moa_attend_plain_sticks_d64_r16, 128, 1, attend<Attention<PlainUnits<float>, 64, 1, 4, 32, true>>(p))
static_assert(Attention<PlainUnits<float>, 64, 1, 4, 32, true>::SHARED_BYTES == 25104, "as the planner has it");
KERNEL(moa_attend_plain_sticks_d128_r32, 64, 1, attend<Attention<PlainUnits<float>, 128, 2, 1, 32, true>>(p))
static_assert(Attention<PlainUnits<float>, 128, 2, 1, 32, true>::SHARED_BYTES == 55312, "as the planner has it");
KERNEL(moa_attend_plain_sticks_d128_r16, 128, 1, attend<Attention<PlainUnits<float>, 128, 1, 4, 32, true>>(p))
static_assert(Attention<PlainUnits<float>, 128, 1, 4, 32, true>::SHARED_BYTES == 45584, "as the planner has it");
KERNEL(moa_attend_plain_sticks_d256_r32, 64, 1, attend<Attention<PlainUnits<float>, 256, 2, 1, 16, true>>(p))
static_assert(Attention<PlainUnits<float>, 256, 2, 1, 16, true>::SHARED_BYTES == 69136, "as the planner has it");
KERNEL(moa_attend_plain_sticks_d256_r16, 64, 1, attend<Attention<PlainUnits<float>, 256, 1, 2, 16, true>>(p))
static_assert(Attention<PlainUnits<float>, 256, 1, 2, 16, true>::SHARED_BYTES == 51600, "as the planner has it");
#endif
