/* SPDX-License-Identifier: Apache-2.0 */
/* The cuda backend. Several ranks of a process may share a GPU, each with a lev_device of its own; they share its
 * primary context. Slabs are plain allocations: nothing is allocated behind the plan except what the driver keeps for
 * the context and loaded kernels. */
#include <cstdio>
#include <cstring>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#else /* a toolkit without it: no ranges */
#define nvtxRangePop()
#define nvtxRangePushA(text) (void)(text)
#endif

#include "common/cuda.cuh"
#include "common/cuda_impl.h"
#include "common/dims.h"

namespace {

constexpr size_t kDetailBytes = 1024;
/* The driver hands out device memory in blocks of 2 MiB; whole ones are aligned to 2 MiB, parts of one to 512 bytes. */
constexpr size_t kDeviceBlock = (size_t)2 << 20;
constexpr size_t kHugePage = (size_t)2 << 20;
constexpr int kTouchers = 16;
constexpr size_t kSmallCopy = (size_t)1 << 20; /* some 20 us */
constexpr int kCopyThreads = 256;

struct cuda_device {
  lev_device base;
  bool in_phase; /* an NVTX range is open */
};

struct cuda_stream {
  lev_stream base;
  cudaStream_t stream;
  lev_status status; /* sticky */
  char detail[kDetailBytes];
};

struct cuda_event {
  lev_event base;
  cudaEvent_t event;
};

cuda_stream *of(lev_stream *stream) {
  return reinterpret_cast<cuda_stream *>(stream);
}
cuda_event *of(lev_event *event) {
  return reinterpret_cast<cuda_event *>(event);
}

/* The calling thread works on this device from now on; cheap when it does already. */
lev_status use(const lev_device *device) {
  LEV_CUDA_TRY(cudaSetDevice(device->config.index));
  return LEV_OK;
}

/* A failed CUDA call on a stream: the error sticks and is returned. */
lev_status broken(lev_stream *stream, cudaError_t error, const char *what) {
  lev_status st = lev_cuda_fail(error, what);
  lev_cuda_stream_fail(stream, st);
  return st;
}

#define STREAM_TRY(stream, call)                                                                                       \
  do {                                                                                                                 \
    cudaError_t error_ = (call);                                                                                       \
    if (error_ != cudaSuccess) return broken((stream), error_, #call);                                                 \
  } while (0)

/* ---- devices ---- */

bool is_hopper(int index) {
  int major = 0, minor = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index) == cudaSuccess && major == 9 &&
         minor == 0;
}

/* No driver, too old a driver and no GPU that the kernels are built for are all zero devices. */
int cuda_count() {
  int count = 0, usable = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess)
    while (usable < count && is_hopper(usable)) ++usable;
  (void)cudaGetLastError();
  return usable;
}

lev_status cuda_open(lev_device *device) {
  LEV_TRY(use(device));
  LEV_CUDA_TRY(cudaFree(nullptr)); /* makes the context */
  return LEV_OK;
}

void cuda_close(lev_device *device) {
  (void)device;
}

lev_status cuda_memory(lev_device *device, size_t *free_bytes, size_t *total_bytes) {
  LEV_TRY(use(device));
  LEV_CUDA_TRY(cudaMemGetInfo(free_bytes, total_bytes));
  return LEV_OK;
}

void cuda_name(lev_device *device, char *out, size_t size) {
  cudaDeviceProp properties;
  bool known = cudaGetDeviceProperties(&properties, device->config.index) == cudaSuccess;
  (void)cudaGetLastError();
  std::snprintf(out, size, "%s", known ? properties.name : "unknown GPU");
}

/* ---- slabs ---- */

size_t host_slab_bytes(size_t bytes) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE), unit = bytes >= kHugePage ? kHugePage : page;
  if (bytes == 0) return page;
  return bytes > SIZE_MAX - unit ? SIZE_MAX : (bytes + unit - 1) / unit * unit;
}

lev_status no_memory(lev_device *device, lev_mem cls, size_t bytes) {
  size_t free_bytes = 0, total_bytes = 0;
  (void)cudaGetLastError();
  if (cls == LEV_MEM_DEVICE) {
    LEV_TRY(cuda_memory(device, &free_bytes, &total_bytes));
    return lev_fail(LEV_ERR_NOMEM, "%zu bytes of device memory asked, %zu of %zu bytes of GPU %d are free", bytes,
                    free_bytes, total_bytes, device->config.index);
  }
  LEV_TRY(lev_device_cpu_ops.memory(device, &free_bytes, &total_bytes));
  return lev_fail(LEV_ERR_NOMEM, "%zu bytes of %s memory asked, %zu of %zu bytes of this machine are free%s", bytes,
                  lev_mem_name(cls), free_bytes, total_bytes,
                  device->config.pin_beyond_free ? ""
                                                 : " (where memory grows on demand: run.check_host_memory = false)");
}

/* First writes to a part of a mapping, one per page. */
struct touched {
  unsigned char *at;
  size_t bytes, page;
};
void *touch(void *part) {
  const touched *t = static_cast<const touched *>(part);
  for (size_t i = 0; i < t->bytes; i += t->page) static_cast<volatile unsigned char *>(t->at)[i] = 0;
  return nullptr;
}

/* By all cores, at most kTouchers: the system zeroes pages at about 3 GB/s per core. */
void touch_all(void *slab, size_t bytes) {
  pthread_t threads[kTouchers];
  touched parts[kTouchers];
  bool started[kTouchers];
  int n = (int)lev_max_i64(1, lev_min_i64(kTouchers, sysconf(_SC_NPROCESSORS_ONLN)));
  int64_t blocks = (int64_t)(bytes / kHugePage);
  if (blocks < n) n = 1;
  for (int i = 0; i < n; ++i) {
    size_t begin = (size_t)lev_part_begin(blocks, n, i) * kHugePage;
    size_t end = i + 1 < n ? (size_t)lev_part_begin(blocks, n, i + 1) * kHugePage : bytes;
    parts[i] = {static_cast<unsigned char *>(slab) + begin, end - begin, (size_t)sysconf(_SC_PAGESIZE)};
    started[i] = i + 1 < n && pthread_create(&threads[i], nullptr, touch, &parts[i]) == 0;
    if (!started[i]) touch(&parts[i]);
  }
  for (int i = 0; i < n; ++i)
    if (started[i]) pthread_join(threads[i], nullptr);
}

/* Pinned memory is mapped and touched by this process, in huge pages where the system has them, and registered once:
 * cheaper than cudaHostAlloc, which pins small pages one by one. */
lev_status alloc_host(lev_device *device, lev_mem cls, size_t bytes, void **out) {
  size_t mapped = host_slab_bytes(bytes), free_bytes, total_bytes;
  bool pinned = cls == LEV_MEM_PINNED && bytes > 0;
  LEV_TRY(lev_device_cpu_ops.memory(device, &free_bytes, &total_bytes));
  void *slab = MAP_FAILED;
  bool fits = mapped <= total_bytes && (!pinned || mapped <= free_bytes);
  if (mapped < SIZE_MAX && (fits || device->config.pin_beyond_free))
    slab = mmap(nullptr, mapped, bytes ? PROT_READ | PROT_WRITE : PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (slab == MAP_FAILED) return no_memory(device, cls, bytes);
  if (pinned) {
    (void)madvise(slab, mapped, MADV_HUGEPAGE);
    touch_all(slab, mapped);
    cudaError_t error = cudaHostRegister(slab, mapped, cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (error != cudaSuccess) {
      munmap(slab, mapped);
      return error == cudaErrorMemoryAllocation ? no_memory(device, cls, bytes)
                                                : lev_cuda_fail(error, "registering pinned memory");
    }
  }
  *out = slab;
  return LEV_OK;
}

lev_status cuda_alloc(lev_device *device, lev_mem cls, size_t bytes, void **out) {
  LEV_TRY(use(device));
  if (cls != LEV_MEM_DEVICE || bytes == 0) return alloc_host(device, cls, bytes, out);
  if (bytes > SIZE_MAX - kDeviceBlock) return no_memory(device, cls, bytes);
  cudaError_t error = cudaMalloc(out, (bytes + kDeviceBlock - 1) / kDeviceBlock * kDeviceBlock);
  if (error == cudaErrorMemoryAllocation) return no_memory(device, cls, bytes);
  if (error != cudaSuccess) return lev_cuda_fail(error, "cudaMalloc");
  return LEV_OK;
}

void cuda_free(lev_device *device, lev_mem cls, void *slab, size_t bytes) {
  (void)cudaSetDevice(device->config.index);
  if (cls == LEV_MEM_DEVICE && bytes > 0) {
    (void)cudaFree(slab);
  } else {
    if (cls == LEV_MEM_PINNED && bytes > 0) (void)cudaHostUnregister(slab);
    munmap(slab, host_slab_bytes(bytes));
  }
  (void)cudaGetLastError();
}

/* ---- streams ---- */

lev_status cuda_stream_open(lev_stream *stream) {
  LEV_TRY(use(stream->device));
  LEV_CUDA_TRY(cudaStreamCreateWithFlags(&of(stream)->stream, cudaStreamNonBlocking));
  return LEV_OK;
}

void cuda_stream_stop(lev_stream *stream) {
  (void)cudaSetDevice(stream->device->config.index);
  (void)cudaStreamSynchronize(of(stream)->stream);
  (void)cudaStreamDestroy(of(stream)->stream);
  of(stream)->stream = nullptr;
  (void)cudaGetLastError();
}

void cuda_stream_close(lev_stream *stream) {
  (void)stream;
}

lev_status cuda_stream_sync(lev_stream *stream) {
  if (!stream->stopped) {
    cudaError_t error = cudaStreamSynchronize(of(stream)->stream);
    if (error != cudaSuccess && of(stream)->status == LEV_OK) return broken(stream, error, "waiting for a stream");
  }
  return lev_cuda_stream_status(stream);
}

/* ---- events ---- */

lev_status cuda_event_open(lev_event *event) {
  LEV_TRY(use(event->device));
  LEV_CUDA_TRY(cudaEventCreateWithFlags(&of(event)->event, event->timed ? cudaEventDefault : cudaEventDisableTiming));
  return LEV_OK;
}

void cuda_event_close(lev_event *event) {
  (void)cudaSetDevice(event->device->config.index);
  (void)cudaEventDestroy(of(event)->event);
  (void)cudaGetLastError();
}

lev_status cuda_event_record(lev_event *event, lev_stream *stream) {
  STREAM_TRY(stream, cudaEventRecord(of(event)->event, of(stream)->stream));
  return LEV_OK;
}

lev_status cuda_event_sync(lev_event *event) {
  cudaError_t error = cudaEventSynchronize(of(event)->event);
  if (error != cudaSuccess && of(event->stream)->status == LEV_OK)
    return broken(event->stream, error, "waiting for an event");
  return lev_cuda_stream_status(event->stream);
}

lev_status cuda_elapsed(lev_event *start, lev_event *stop, double *seconds) {
  float milliseconds = 0;
  LEV_CUDA_TRY(cudaEventElapsedTime(&milliseconds, of(start)->event, of(stop)->event));
  *seconds = milliseconds * 1e-3;
  return LEV_OK;
}

lev_status cuda_stream_wait(lev_stream *stream, lev_event *event) {
  lev_status other = lev_cuda_stream_status(event->stream);
  if (other != LEV_OK) lev_cuda_stream_fail(stream, other);
  STREAM_TRY(stream, cudaStreamWaitEvent(of(stream)->stream, of(event)->event, 0));
  return LEV_OK;
}

/* ---- operations ---- */

/* Each direction over the host link has one copy engine, where a few numbers that the host waits for would queue behind
 * hundreds of megabytes. Small copies of pinned memory are therefore made by a kernel, which reads or writes it
 * directly. T: bytes or 16 of them. */
template <class T> __global__ void __launch_bounds__(kCopyThreads) copy_kernel(T *dst, const T *src, size_t n) {
  for (size_t i = (size_t)blockIdx.x * kCopyThreads + threadIdx.x; i < n; i += (size_t)gridDim.x * kCopyThreads)
    dst[i] = src[i];
}

/* Whether the address lies in a slab of this class. */
bool lies_in(const lev_device *device, lev_mem cls, const void *address) {
  uintptr_t a = (uintptr_t)address;
  for (const lev_slab *s = device->slabs; s; s = s->next)
    if (s->cls == cls && a >= (uintptr_t)s->address && a - (uintptr_t)s->address < s->bytes) return true;
  return false;
}

lev_status copy_by_kernel(lev_stream *stream, void *dst, const void *src, size_t bytes) {
  cudaStream_t s = of(stream)->stream;
  LEV_TRY(use(stream->device));
  if (((uintptr_t)dst | (uintptr_t)src | bytes) % sizeof(uint4) == 0) {
    size_t n = bytes / sizeof(uint4), blocks = (n + kCopyThreads - 1) / kCopyThreads;
    copy_kernel<<<(unsigned)blocks, kCopyThreads, 0, s>>>(static_cast<uint4 *>(dst), static_cast<const uint4 *>(src),
                                                          n);
  } else {
    size_t blocks = (bytes + kCopyThreads - 1) / kCopyThreads;
    copy_kernel<<<(unsigned)blocks, kCopyThreads, 0, s>>>(static_cast<unsigned char *>(dst),
                                                          static_cast<const unsigned char *>(src), bytes);
  }
  STREAM_TRY(stream, cudaGetLastError());
  return LEV_OK;
}

lev_status cuda_copy(lev_stream *stream, void *dst, const void *src, size_t bytes) {
  if (of(stream)->status != LEV_OK) return LEV_OK;
  const lev_device *device = stream->device;
  if (bytes <= kSmallCopy && ((lies_in(device, LEV_MEM_PINNED, dst) && lies_in(device, LEV_MEM_DEVICE, src)) ||
                              (lies_in(device, LEV_MEM_DEVICE, dst) && lies_in(device, LEV_MEM_PINNED, src))))
    return copy_by_kernel(stream, dst, src, bytes);
  STREAM_TRY(stream, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDefault, of(stream)->stream));
  return LEV_OK;
}

/* Memory that no GPU can reach is filled by the host, which waits for the stream to come there. */
lev_status cuda_fill(lev_stream *stream, void *dst, int byte, size_t bytes) {
  if (of(stream)->status != LEV_OK) return LEV_OK;
  cudaPointerAttributes attributes;
  STREAM_TRY(stream, cudaPointerGetAttributes(&attributes, dst));
  if (attributes.type == cudaMemoryTypeUnregistered) {
    LEV_TRY(cuda_stream_sync(stream));
    std::memset(dst, byte, bytes);
    return LEV_OK;
  }
  STREAM_TRY(stream, cudaMemsetAsync(dst, byte, bytes, of(stream)->stream));
  return LEV_OK;
}

lev_status cuda_launch(lev_stream *stream, const lev_kernel *kernel, const void *args, size_t args_bytes) {
  (void)args_bytes;
  if (!kernel->cuda) return lev_fail(LEV_ERR_UNSUPPORTED, "%s has no cuda side", kernel->name);
  if (of(stream)->status != LEV_OK) return LEV_OK;
  LEV_TRY(use(stream->device));
  lev_status st = kernel->cuda(args, of(stream)->stream);
  cudaError_t error = cudaGetLastError();
  if (st == LEV_OK && error != cudaSuccess) return broken(stream, error, kernel->name);
  if (st == LEV_ERR_DEVICE) lev_cuda_stream_fail(stream, st);
  return st;
}

/* ---- phases ---- */

/* Without a tool that listens these are calls of empty functions. */
void cuda_phase(lev_device *device, const char *name, int64_t index) {
  bool *open = &reinterpret_cast<cuda_device *>(device)->in_phase;
  if (*open) nvtxRangePop();
  *open = name != nullptr;
  if (!name) return;
  char text[96];
  if (index < 0)
    std::snprintf(text, sizeof text, "%s", name);
  else
    std::snprintf(text, sizeof text, "%s %lld", name, (long long)index);
  nvtxRangePushA(text);
}

} // namespace

/* ---- shared with the rest of common/ ---- */

void lev_cuda_stream_fail(lev_stream *stream, lev_status status) {
  cuda_stream *s = of(stream);
  if (status == LEV_OK || s->status != LEV_OK) return;
  std::snprintf(s->detail, sizeof s->detail, "%s", lev_detail());
  s->status = status;
}

lev_status lev_cuda_stream_status(lev_stream *stream) {
  cuda_stream *s = of(stream);
  if (s->status != LEV_OK) lev_detail_set(s->detail);
  return s->status;
}

lev_status lev_cuda_wait_peer(lev_stream *stream, const lev_event *event) {
  STREAM_TRY(stream, cudaStreamWaitEvent(of(stream)->stream, reinterpret_cast<const cuda_event *>(event)->event, 0));
  return LEV_OK;
}

lev_status lev_cuda_reach(lev_device *device, int peer) {
  int mine = device->config.index, can = 0;
  if (peer == mine) return LEV_OK;
  LEV_TRY(use(device));
  LEV_CUDA_TRY(cudaDeviceCanAccessPeer(&can, mine, peer));
  if (!can) return lev_fail(LEV_ERR_UNSUPPORTED, "GPU %d cannot reach the memory of GPU %d", mine, peer);
  cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
  if (error != cudaSuccess && error != cudaErrorPeerAccessAlreadyEnabled)
    return lev_cuda_fail(error, "cudaDeviceEnablePeerAccess");
  (void)cudaGetLastError();
  return LEV_OK;
}

void lev_cuda_drain(lev_device *device, int peer) {
  if (peer == device->config.index) return;
  if (cudaSetDevice(peer) == cudaSuccess) (void)cudaDeviceSynchronize();
  (void)cudaSetDevice(device->config.index);
  (void)cudaGetLastError(); /* failures show on the streams concerned */
}

extern "C" const lev_device_ops lev_device_cuda_ops = {
    .count = cuda_count,
    .device_bytes = sizeof(cuda_device),
    .stream_bytes = sizeof(cuda_stream),
    .event_bytes = sizeof(cuda_event),
    .open = cuda_open,
    .close = cuda_close,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .memory = cuda_memory,
    .name = cuda_name,
    .stream_open = cuda_stream_open,
    .stream_stop = cuda_stream_stop,
    .stream_close = cuda_stream_close,
    .stream_sync = cuda_stream_sync,
    .event_open = cuda_event_open,
    .event_close = cuda_event_close,
    .event_record = cuda_event_record,
    .event_sync = cuda_event_sync,
    .event_elapsed = cuda_elapsed,
    .stream_wait = cuda_stream_wait,
    .copy = cuda_copy,
    .fill = cuda_fill,
    .launch = cuda_launch,
    .phase = cuda_phase,
};
