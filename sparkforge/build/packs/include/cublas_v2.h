// Stands in for cuBLAS's header, which is in a wheel of 400 MB: what is compiled with it uses types
// and names of status codes only, and calls nothing of cuBLAS.
#pragma once

#include <math.h>  // the real one brings it with cuComplex.h

enum cublasStatus_t {
  CUBLAS_STATUS_SUCCESS = 0,
  CUBLAS_STATUS_NOT_INITIALIZED = 1,
  CUBLAS_STATUS_ALLOC_FAILED = 3,
  CUBLAS_STATUS_INVALID_VALUE = 7,
  CUBLAS_STATUS_ARCH_MISMATCH = 8,
  CUBLAS_STATUS_MAPPING_ERROR = 11,
  CUBLAS_STATUS_EXECUTION_FAILED = 13,
  CUBLAS_STATUS_INTERNAL_ERROR = 14,
  CUBLAS_STATUS_NOT_SUPPORTED = 15,
  CUBLAS_STATUS_LICENSE_ERROR = 16
};
enum cublasOperation_t { CUBLAS_OP_N = 0 };
enum cublasComputeType_t { CUBLAS_COMPUTE_32F = 68 };
typedef struct cublasContext* cublasHandle_t;
