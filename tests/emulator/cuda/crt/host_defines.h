// SPDX-License-Identifier: Apache-2.0
// Stands for the toolkit's file of this name, which the runtime wheel leaves out: the keywords of
// CUDA C++ as g++ shall read them. A variable in shared memory becomes thread-local, because every
// block of a cluster runs on an operating-system thread of its own.
#pragma once

#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __constant__
#define __cudart_builtin__
#define __device__
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __forceinline__ inline __attribute__((always_inline))
#define __global__
#define __grid_constant__
#define __host__
#define __managed__
#define __shared__ thread_local
#define __cluster_dims__(...)
#define __launch_bounds__(...)
#define CUDARTAPI
