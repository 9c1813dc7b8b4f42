# What the GPU build needs, for KVD_CUDA=ON: nvcc 13 or later. Only kernels/*.cu, their test and their
# benchmark are compiled by it; everything else stays as it is on a machine without a toolkit.
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(KVD_NVCC nvcc HINTS /usr/local/cuda/bin)
  if(NOT KVD_NVCC)
    message(FATAL_ERROR "KVD_CUDA=ON: expected nvcc 13 or later on PATH or in /usr/local/cuda/bin, found none: "
      "install the CUDA toolkit, set CUDACXX, or configure with -DKVD_CUDA=OFF")
  endif()
  set(CMAKE_CUDA_COMPILER ${KVD_NVCC})
endif()
# 90a-real: machine code for Hopper; 90-virtual: PTX that later drivers can compile.
if(NOT CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES "90a-real;90-virtual")
endif()
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13)
  message(FATAL_ERROR "KVD_CUDA=ON: expected nvcc 13 or later, got ${CMAKE_CUDA_COMPILER_VERSION} "
    "(${CMAKE_CUDA_COMPILER})")
endif()
# CMake 3.25 knows no flag for CUDA C++20.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
if(KVD_CCACHE)
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${KVD_CCACHE})
endif()
find_package(CUDAToolkit 13 REQUIRED)

target_compile_definitions(kvd_options INTERFACE KVD_CUDA=1)
target_compile_options(kvd_options INTERFACE
  $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings;-lineinfo;-Xcompiler=-Wall,-Wextra,-Wshadow,-Werror>)

# Everything that needs nvcc, and nothing else: the kernels, their test and their benchmark.
add_custom_target(kvd_gpu)

# kvd_gpu_program(<target>): builds it with kvd_gpu, and lets it and its libraries find libraries in ../lib beside
# it, where deploy/bundle.sh puts them. The older kind of run path is also searched for a library's own needs.
function(kvd_gpu_program target)
  add_dependencies(kvd_gpu ${target})
  set_target_properties(${target} PROPERTIES BUILD_RPATH "$ORIGIN/../lib")
  target_link_options(${target} PRIVATE LINKER:--disable-new-dtags)
endfunction()
