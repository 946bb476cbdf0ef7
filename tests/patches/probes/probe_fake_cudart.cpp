// The part of the CUDA runtime that probe_moe_dispatch.cu reaches, without a GPU.
//
// Declared here by hand: with the real headers nvcc would want device versions, too. The functions
// whose names begin with underscores are called by the start-up code that nvcc adds.

int fake_capability = 0;  // for example 121

extern "C" {
int cudaGetDevice(int* device) {
  *device = 0;
  return 0;
}

int cudaDeviceGetAttribute(int* value, int attribute, int) {
  constexpr int major = 75, minor = 76;  // cudaDevAttrComputeCapability{Major,Minor}
  constexpr int multiprocessors = 48;
  *value = attribute == major   ? fake_capability / 10
           : attribute == minor ? fake_capability % 10
                                : multiprocessors;
  return 0;
}

int cudaGetLastError() { return 0; }
char const* cudaGetErrorString(int) { return "the fake runtime raises nothing"; }

void** __cudaRegisterFatBinary(void*) {
  static void* handle = nullptr;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, char const*, int, unsigned long, int, int) {}
}
