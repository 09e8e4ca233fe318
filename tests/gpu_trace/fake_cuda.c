/* A CUDA runtime and driver without a GPU: eight H100s whose kernels do nothing, for a process that traces fake tensors.
 *
 * Preloaded before torch is imported, it answers what device guards, streams, events, generators, the autograd engine
 * and data parallelism ask. Its soname is libcuda.so.1, so that torch, which opens the driver by that name, finds this
 * library too. Types come from the driver_types.h that torch's own runtime package brings; functions are declared here,
 * since their prototypes differ between CUDA 12 and 13 and the ABI of those in use does not.
 *
 * Device memory is refused but for small pieces: fake tensors need none. Host memory that is pinned, or registered, is
 * ordinary memory. A copy may not cross from one registration into another, as with the
 * driver. FAKE_CUDA_DEVICES changes the number of devices.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <driver_types.h>

#define OK(name, ...) cudaError_t name(__VA_ARGS__) { return cudaSuccess; }
#define HANDLE(name, type, ...) cudaError_t name(type *made, ##__VA_ARGS__) { *made = (type)(handles += 16); return cudaSuccess; }

static const size_t memory = 85029158912ull; /* of an H100 with 80 GB */
static uintptr_t handles = 0x1000;
static __thread int current = 0;

static int devices(void) {
    const char *text = getenv("FAKE_CUDA_DEVICES");
    return text ? atoi(text) : 8;
}

/* Devices. */

cudaError_t cudaGetDeviceCount(int *count) { *count = devices(); return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { current = device; return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t *available, size_t *total) { *available = *total = memory; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 1; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13000; return cudaSuccess; }
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, size, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "NVIDIA H100 80GB HBM3 (pretended)");
    p->major = 9;
    p->totalGlobalMem = memory;
    p->multiProcessorCount = 132;
    p->sharedMemPerBlock = 48 << 10;
    p->sharedMemPerBlockOptin = 227 << 10;
    p->sharedMemPerMultiprocessor = 228 << 10;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->l2CacheSize = 50 << 20;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->pciDeviceID = device;
    p->unifiedAddressing = 1;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties_v2(struct cudaDeviceProp *p, int device) { return cudaGetDeviceProperties(p, device); }

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 << 10; break;
    case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
    default: *value = 1;
    }
    return cudaSuccess;
}

OK(cudaDeviceSynchronize, void)
OK(cudaDeviceEnablePeerAccess, int device, unsigned flags)
OK(cudaGetLastError, void)
OK(cudaPeekAtLastError, void)
const char *cudaGetErrorName(cudaError_t error) { return error ? "fakeCudaError" : "cudaSuccess"; }
const char *cudaGetErrorString(cudaError_t error) { return error ? "refused by the fake CUDA runtime" : "no error"; }

/* Streams and events: handles without anything behind them. */

HANDLE(cudaStreamCreate, cudaStream_t)
HANDLE(cudaStreamCreateWithFlags, cudaStream_t, unsigned flags)
HANDLE(cudaStreamCreateWithPriority, cudaStream_t, unsigned flags, int priority)
HANDLE(cudaEventCreate, cudaEvent_t)
HANDLE(cudaEventCreateWithFlags, cudaEvent_t, unsigned flags)
OK(cudaStreamDestroy, cudaStream_t stream)
OK(cudaStreamQuery, cudaStream_t stream)
OK(cudaStreamSynchronize, cudaStream_t stream)
OK(cudaStreamWaitEvent, cudaStream_t stream, cudaEvent_t event, unsigned flags)
OK(cudaEventDestroy, cudaEvent_t event)
OK(cudaEventQuery, cudaEvent_t event)
OK(cudaEventRecord, cudaEvent_t event, cudaStream_t stream)
OK(cudaEventRecordWithFlags, cudaEvent_t event, cudaStream_t stream, unsigned flags)
OK(cudaEventSynchronize, cudaEvent_t event)
OK(cudaThreadExchangeStreamCaptureMode, enum cudaStreamCaptureMode *mode)
OK(cudaLaunchHostFunc, cudaStream_t stream, cudaHostFn_t function, void *data)
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t a, cudaEvent_t b) { *ms = 1; return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = 0; return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
/* The status is the second argument in every version; the rest are left unset where nothing is captured. */
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    return cudaStreamIsCapturing(stream, status);
}

/* Kernels do nothing. */

OK(cudaLaunchKernel, const void *function)
OK(cudaLaunchKernelExC, const void *config)
OK(cudaFuncSetAttribute, const void *function, enum cudaFuncAttribute attribute, int value)
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->numRegs = 32;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared) {
    *blocks = 2;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *blocks, const void *function, int threads, size_t shared, unsigned flags) {
    *blocks = 2;
    return cudaSuccess;
}

/* Memory. */

struct piece { const char *start; size_t size; };
static struct piece registered[65536];
static int pieces = 0;

static const struct piece *registration(const void *address) {
    for (int i = 0; i < pieces; i++)
        if ((const char *)address >= registered[i].start && (const char *)address < registered[i].start + registered[i].size)
            return &registered[i];
    return NULL;
}

static int crosses(const void *address, size_t size) {
    const struct piece *piece = registration(address);
    return piece && (const char *)address + size > piece->start + piece->size;
}

static cudaError_t host_memory(void **made, size_t size) {
    *made = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return *made == MAP_FAILED ? cudaErrorMemoryAllocation : cudaSuccess;
}

/* torch before 2.12 makes each device's context with a small tensor; whoever wants more has escaped from the trace. */
cudaError_t cudaMalloc(void **made, size_t size) {
    return size > 64 << 20 ? cudaErrorMemoryAllocation : host_memory(made, size);
}
cudaError_t cudaMallocAsync(void **made, size_t size, cudaStream_t stream) { return cudaErrorMemoryAllocation; }
OK(cudaFree, void *address)
OK(cudaFreeAsync, void *address, cudaStream_t stream)
cudaError_t cudaHostAlloc(void **made, size_t size, unsigned flags) { return host_memory(made, size); }
cudaError_t cudaMallocHost(void **made, size_t size) { return host_memory(made, size); }
OK(cudaFreeHost, void *address)

cudaError_t cudaHostRegister(void *address, size_t size, unsigned flags) {
    if (pieces == sizeof registered / sizeof *registered)
        return cudaErrorMemoryAllocation;
    registered[pieces++] = (struct piece){address, size};
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *address) {
    for (int i = 0; i < pieces; i++)
        if (registered[i].start == address) {
            registered[i] = registered[--pieces];
            return cudaSuccess;
        }
    return cudaErrorHostMemoryNotRegistered;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    if (crosses(to, size) || crosses(from, size))
        return cudaErrorInvalidValue;
    memmove(to, from, size);
    return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    return cudaMemcpyAsync(to, from, size, kind, NULL);
}
OK(cudaMemset, void *address, int value, size_t size)
OK(cudaMemsetAsync, void *address, int value, size_t size, cudaStream_t stream)

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    memset(attributes, 0, sizeof *attributes);
    attributes->type = registration(address) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    attributes->hostPointer = (void *)address;
    return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char *symbol, void **function, unsigned version, unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    *function = NULL;
    if (result)
        *result = cudaDriverEntryPointSymbolNotFound;
    return cudaErrorSymbolNotFound;
}

/* The driver: what torch's lazy loader asks for. */

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *count) { *count = devices(); return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuGetErrorString(int error, const char **text) { *text = "refused by the fake CUDA driver"; return 0; }
int cuGetErrorName(int error, const char **text) { *text = "fakeCudaError"; return 0; }
