# What the GPU build needs, for KVD_CUDA=ON: nvcc 13 or later. Only .cu files are compiled by it; host code that calls
# the CUDA runtime stands under KVD_CUDA, and everything else stays as it is on a machine without a toolkit.
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

target_compile_definitions(kvd_options INTERFACE KVD_CUDA=1 $<$<BOOL:${KVD_ALL_GEOMETRIES}>:KVD_ALL_GEOMETRIES=1>)
target_compile_options(kvd_options INTERFACE
  $<$<COMPILE_LANGUAGE:CUDA>:-Werror=all-warnings;-lineinfo;--compress-mode=size;-Xcompiler=-Wall,-Wextra,-Wshadow,-Werror>)

# Everything that runs on a GPU machine, in deploy/bundle.sh's folder: the kernels, the tests labelled gpu, the
# benchmarks, the daemon and its tool.
add_custom_target(kvd_gpu)

# kvd_gpu_program(<target>): builds it with kvd_gpu, and lets it and its libraries find libraries in ../lib beside
# it, where deploy/bundle.sh puts them. The older kind of run path is also searched for a library's own needs.
function(kvd_gpu_program target)
  add_dependencies(kvd_gpu ${target})
  set_target_properties(${target} PROPERTIES BUILD_RPATH "$ORIGIN/../lib")
  target_link_options(${target} PRIVATE LINKER:--disable-new-dtags)
  set_property(GLOBAL APPEND_STRING PROPERTY KVD_GPU_PROGRAMS "$<TARGET_FILE:${target}>\n")
endfunction()

# The daemon and locksctl belong to them; <build>/gpu_programs lists them all, one path a line. Runs when every target
# is known.
function(kvd_list_gpu_programs)
  kvd_gpu_program(locks-kvd)
  kvd_gpu_program(locksctl)
  get_property(programs GLOBAL PROPERTY KVD_GPU_PROGRAMS)
  file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/gpu_programs CONTENT "${programs}")
endfunction()
cmake_language(DEFER CALL kvd_list_gpu_programs)
