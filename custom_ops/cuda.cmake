# The CUDA kernels: whether they are built, with which compiler and for which GPUs. nvcc is called as a program, by
# rules of its own for each file: a language of CMake would have to be there before anything else is known, and does
# not follow the layout of NVIDIA's wheels.
#
# After it: GRAPHROT_CUDA_BUILT, GRAPHROT_CUDA_VERSION, GRAPHROT_CUDA_REASON (why not), GRAPHROT_CUDA_SOURCES, and
# graphrot_cuda_library(name source...) where it is built.

set(GRAPHROT_CUDA AUTO CACHE STRING "CUDA kernels: AUTO (where nvcc is found), ON (an error without) or OFF")
set_property(CACHE GRAPHROT_CUDA PROPERTY STRINGS AUTO ON OFF)
# Each costs as much as the one before: a minute of a processor.
set(GRAPHROT_CUDA_ARCHITECTURES 80 CACHE STRING
  "GPUs that machine code is made for: 80 runs on 86 and 89, too. For others the driver compiles the first one's PTX")
set(GRAPHROT_CUDA_SOURCES
  common/cuda/runtime.cu hadamard/cuda.cu matmul/rows_cuda.cu matmul/product_cuda.cu matmul/gemv_cuda.cu
  attention/attention_cuda.cu attention/store_cuda.cu attention/few_cuda.cu attention/many_cuda.cu
  attention/combine_cuda.cu)

# In `reason`: why there is no compiler, or empty. Sets nvcc, its version and the static runtime in the parent.
function(graphrot_find_cuda reason)
  set(${reason} "" PARENT_SCOPE)
  if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux" OR CMAKE_CROSSCOMPILING)
    set(${reason} "they are built on Linux, for the machine itself" PARENT_SCOPE)
    return()
  endif()
  if(GRAPHROT_SANITIZE)
    set(${reason} "nvcc has no sanitizers" PARENT_SCOPE)
    return()
  endif()
  find_package(Python COMPONENTS Interpreter QUIET)
  if(Python_EXECUTABLE)
    execute_process(COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/cuda_toolkit.py nvcc
      OUTPUT_VARIABLE nvcc ERROR_VARIABLE words OUTPUT_STRIP_TRAILING_WHITESPACE)
    string(REGEX REPLACE ".*Error: ([^\n]+).*" "\\1" words "${words}")
  else()
    find_program(GRAPHROT_NVCC nvcc)
    set(nvcc "${GRAPHROT_NVCC}")
  endif()
  if(NOT nvcc)
    if(NOT words)
      set(words "nvcc is neither on PATH nor in ${Python_EXECUTABLE}'s packages")
    endif()
    set(${reason} "${words}" PARENT_SCOPE)
    return()
  endif()

  # Where its headers and libraries are, in its own words.
  execute_process(COMMAND ${nvcc} --version OUTPUT_VARIABLE version ERROR_QUIET)
  string(REGEX MATCH "V([0-9]+[.][0-9.]+)" version "${version}")
  set(version "${CMAKE_MATCH_1}")
  execute_process(COMMAND ${nvcc} --dryrun -x cu -c /dev/null -o none.o OUTPUT_VARIABLE dry ERROR_VARIABLE dry)
  string(REGEX MATCH "TOP=([^\n]+)" top "${dry}")
  get_filename_component(top "${CMAKE_MATCH_1}" REALPATH)
  file(GLOB folders ${top}/lib64 ${top}/lib ${top}/targets/*/lib ${top}/../cuda_runtime/lib)
  find_library(GRAPHROT_CUDART cudart_static PATHS ${folders} NO_DEFAULT_PATH)
  file(GLOB headers ${top}/include/cuda_runtime.h ${top}/targets/*/include/cuda_runtime.h ${top}/../cuda_runtime/include/cuda_runtime.h)
  if(NOT version OR NOT GRAPHROT_CUDART OR NOT headers)
    set(${reason} "${nvcc} lacks cuda_runtime.h or libcudart_static.a beside it" PARENT_SCOPE)
    return()
  endif()
  list(GET headers 0 header)
  get_filename_component(include ${header} DIRECTORY)

  # Old versions do not know new GPUs, and refuse new host compilers.
  execute_process(COMMAND ${nvcc} --list-gpu-arch OUTPUT_VARIABLE known ERROR_QUIET)
  set(code)
  foreach(architecture IN LISTS GRAPHROT_CUDA_ARCHITECTURES)
    if(NOT known MATCHES "compute_${architecture}\n")
      set(${reason} "nvcc ${version} does not know architecture ${architecture} (GRAPHROT_CUDA_ARCHITECTURES)" PARENT_SCOPE)
      return()
    endif()
    set(kinds "sm_${architecture}")
    if(NOT code)
      set(kinds "[sm_${architecture},compute_${architecture}]")
    endif()
    list(APPEND code "-gencode=arch=compute_${architecture},code=${kinds}")
  endforeach()
  # Products and sums are rounded as written, as in the tests on the CPU: kernels say fmaf where they mean it.
  set(flags -std=c++17 -O3 -fmad=false -ccbin ${CMAKE_CXX_COMPILER} -I${include} -Xcompiler=-fPIC,-fvisibility=hidden,-Wall,-Wextra
    -Xfatbin=-compress-all)
  if(GRAPHROT_WERROR)
    list(APPEND flags -Werror=all-warnings -Xcompiler=-Werror)
  endif()
  set(probe ${CMAKE_CURRENT_BINARY_DIR}/probe.cu)
  file(WRITE ${probe} "#include <cuda_runtime.h>\n__global__ void probe() {}\n")
  execute_process(COMMAND ${nvcc} ${flags} ${code} -c ${probe} -o ${probe}.o
    RESULT_VARIABLE failed OUTPUT_VARIABLE words ERROR_VARIABLE words)
  if(failed)
    string(REGEX MATCH "[^\n]*error[^\n]*" words "${words}")
    set(${reason} "nvcc ${version} does not work with ${CMAKE_CXX_COMPILER}: ${words}" PARENT_SCOPE)
    return()
  endif()
  set(graphrot_nvcc ${nvcc} PARENT_SCOPE)
  set(graphrot_cuda_flags ${flags} ${code} PARENT_SCOPE)
  set(GRAPHROT_CUDA_VERSION ${version} PARENT_SCOPE)
endfunction()

# A library of CUDA sources for others to link.
function(graphrot_cuda_library name)
  set(objects)
  foreach(source IN LISTS ARGN)
    set(object ${CMAKE_CURRENT_BINARY_DIR}/${source}.o)
    get_filename_component(folder ${object} DIRECTORY)
    file(MAKE_DIRECTORY ${folder})
    add_custom_command(OUTPUT ${object}
      COMMAND ${graphrot_nvcc} ${graphrot_cuda_flags} -I${PROJECT_SOURCE_DIR} -MD -MT ${object} -MF ${object}.d
        -c ${CMAKE_CURRENT_SOURCE_DIR}/${source} -o ${object}
      DEPENDS ${source} DEPFILE ${object}.d COMMENT "Building CUDA object ${source}.o" VERBATIM)
    list(APPEND objects ${object})
  endforeach()
  add_custom_target(${name}_objects DEPENDS ${objects})
  add_library(${name} INTERFACE)
  add_dependencies(${name} ${name}_objects)
  find_package(Threads REQUIRED)
  target_link_libraries(${name} INTERFACE ${objects} ${GRAPHROT_CUDART} Threads::Threads ${CMAKE_DL_LIBS} rt)
endfunction()

if(NOT GRAPHROT_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "GRAPHROT_CUDA is ${GRAPHROT_CUDA}; it must be AUTO, ON or OFF")
endif()
set(GRAPHROT_CUDA_BUILT 0)
set(GRAPHROT_CUDA_VERSION "")
set(GRAPHROT_CUDA_REASON "GRAPHROT_CUDA=OFF")
if(NOT GRAPHROT_CUDA STREQUAL "OFF")
  graphrot_find_cuda(GRAPHROT_CUDA_REASON)
  if(NOT GRAPHROT_CUDA_REASON)
    set(GRAPHROT_CUDA_BUILT 1)
  elseif(GRAPHROT_CUDA STREQUAL "ON")
    message(FATAL_ERROR "CUDA kernels cannot be built: ${GRAPHROT_CUDA_REASON}")
  endif()
endif()

# For graphrot_describe().
string(REGEX REPLACE "[\"\\]" "'" words "${GRAPHROT_CUDA_REASON}")
set(built false)
set(architectures)
if(GRAPHROT_CUDA_BUILT)
  set(built true)
  list(TRANSFORM GRAPHROT_CUDA_ARCHITECTURES REPLACE "(.+)" "\"\\1\"" OUTPUT_VARIABLE architectures)
  list(JOIN architectures ", " architectures)
endif()
string(CONCAT GRAPHROT_CUDA_DESCRIPTION "{\"built\": ${built}, \"compiler\": \"${GRAPHROT_CUDA_VERSION}\", "
  "\"architectures\": [${architectures}], \"reason\": \"${words}\"}")

if(GRAPHROT_CUDA_BUILT)
  message(STATUS "CUDA kernels: built by ${graphrot_nvcc} ${GRAPHROT_CUDA_VERSION} for ${GRAPHROT_CUDA_ARCHITECTURES}")
else()
  message(STATUS "CUDA kernels: not built (${GRAPHROT_CUDA_REASON})")
endif()
