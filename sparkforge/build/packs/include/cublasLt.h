#pragma once

#include <stddef.h>

#include "cublas_v2.h"

enum cublasLtOrder_t { CUBLASLT_ORDER_COL = 0 };
typedef struct cublasLtContext* cublasLtHandle_t;
typedef struct cublasLtMatmulDescription* cublasLtMatmulDesc_t;
typedef struct cublasLtMatrixDescription* cublasLtMatrixLayout_t;
// as large as the real ones
struct cublasLtMatmulAlgo_t {
  unsigned long long data[8];
};
struct cublasLtMatmulHeuristicResult_t {
  cublasLtMatmulAlgo_t algo;
  size_t workspaceSize;
  cublasStatus_t state;
  float wavesCount;
  int reserved[4];
};
