# Runs the CMakeLists.txt of a vLLM tree in script mode, down to the flags that each source gets:
#
#   cd TREE; cmake -DARCHS=12.1 -DCUDA=13.0.88 -DTORCH=FOLDER -DSTAND_INS=FOLDER -DOUT=FILE \
#     -P cuda_archs.cmake
#
# Everything that decides about architectures is the tree's own, and torch's reading of the list
# (TORCH: its share/cmake). Stand-ins are there only for what script mode has not: looking for
# tools, fetching, making targets. OUT gets a line SOURCE|FLAG for each flag of a source.
cmake_minimum_required(VERSION 3.25)

# stub modules (FetchContent) come before CMake's own
list(INSERT CMAKE_MODULE_PATH 0 "${CMAKE_CURRENT_LIST_DIR}")
file(WRITE "${OUT}" "")

macro(find_package name)
  if("${name}" STREQUAL "Python")
    set(Python_FOUND TRUE)
    set(Python_VERSION 3.12.3)
    set(Python_VERSION_MAJOR 3)
    set(Python_VERSION_MINOR 12)
  elseif("${name}" STREQUAL "Torch")
    set(CUDA_FOUND TRUE)
    set(Torch_VERSION 2.14.0)
    set(TORCH_INCLUDE_DIRS "${STAND_INS}")
    set(CMAKE_CUDA_COMPILER_VERSION "${CUDA}")
    string(REGEX MATCH "^[0-9]+\\.[0-9]+" CUDA_VERSION "${CUDA}")
    # what torch's own CMake does with TORCH_CUDA_ARCH_LIST, by its own function
    include("${TORCH}/Caffe2/Modules_CUDA_fix/upstream/FindCUDA/select_compute_arch.cmake")
    cuda_select_nvcc_arch_flags(_torch_flags ${ARCHS})
    string(REPLACE ";" " " CMAKE_CUDA_FLAGS "-Wall;${_torch_flags}")
  endif()
endmacro()

# no process is started: the generators' files lie there already, and the answers of Python matter
# to no architecture
function(execute_process)
  cmake_parse_arguments(arg "" "RESULT_VARIABLE;OUTPUT_VARIABLE;ERROR_VARIABLE" "" ${ARGN})
  if(arg_OUTPUT_VARIABLE)
    set(${arg_OUTPUT_VARIABLE} "" PARENT_SCOPE)
  endif()
  if(arg_RESULT_VARIABLE) # last: Marlin's call names one variable for both
    set(${arg_RESULT_VARIABLE} 0 PARENT_SCOPE)
  endif()
endfunction()

function(set_property scope)
  if(NOT scope STREQUAL "SOURCE")
    return()
  endif()
  list(FIND ARGN APPEND end)
  list(SUBLIST ARGN 0 ${end} sources)
  if(NOT "${ARGN}" MATCHES "(arch=[^>;]*)")
    return()
  endif()
  set(flag "${CMAKE_MATCH_1}")
  foreach(source IN LISTS sources)
    string(REPLACE "${STAND_INS}/" "" source "${source}")
    file(APPEND "${OUT}" "${source}|${flag}\n")
  endforeach()
endfunction()

foreach(command project find_program find_library install include_directories enable_language
    Python_add_library add_library add_custom_target add_custom_command add_dependencies
    set_target_properties set_source_files_properties target_compile_options
    target_compile_definitions target_include_directories target_link_libraries
    cmake_minimum_required)
  cmake_language(EVAL CODE "function(${command})\nendfunction()")
endforeach()

set(VLLM_PYTHON_EXECUTABLE /usr/bin/python3)
set(FETCHCONTENT_BASE_DIR "${STAND_INS}/fetched")
include("${CMAKE_SOURCE_DIR}/CMakeLists.txt")
