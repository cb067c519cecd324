// Says in NVTX what a trace can't hold: L2 set-aside and access policy windows. The
// l2-cache rules of streamlint read these marks; docs/l2-marks.md defines them. Copy
// this C++ header into your program. Without a profiler a mark costs some nanoseconds.
//
//   streamlint::l2_properties(properties);                    // once
//   cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, bytes);
//   streamlint::l2_setaside(granted);                         // what cudaDeviceGetLimit says
//   cudaStreamSetAttribute(stream, cudaStreamAttributeAccessPolicyWindow, &value);
//   {
//     streamlint::L2Window window(value.accessPolicyWindow);  // around the launches
//     kernel<<<grid, block, 0, stream>>>(...);                // that run under it
//   }
//   cudaCtxResetPersistingL2Cache();
//   streamlint::l2_reset();
#pragma once

#include <cuda_runtime_api.h>
#include <nvtx3/nvToolsExt.h>

#include <cinttypes>
#include <cstddef>
#include <cstdint>
#include <cstdio>

namespace streamlint {

inline nvtxDomainHandle_t domain() {
  static const nvtxDomainHandle_t handle = nvtxDomainCreateA("streamlint");
  return handle;
}

inline nvtxEventAttributes_t event(const char* text) {
  nvtxEventAttributes_t attributes = {};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_ASCII;
  attributes.message.ascii = text;
  return attributes;
}

inline void mark(const char* text) {
  const nvtxEventAttributes_t attributes = event(text);
  nvtxDomainMarkEx(domain(), &attributes);
}

// Once, so that a request larger than the GPU allows can be told from one it grants.
inline void l2_properties(const cudaDeviceProp& properties) {
  char text[128];
  std::snprintf(text, sizeof text, "l2.props l2=%d persistMax=%d maxWindow=%d",
                properties.l2CacheSize, properties.persistingL2CacheMaxSize,
                properties.accessPolicyMaxWindowSize);
  mark(text);
}

// After each cudaDeviceSetLimit(cudaLimitPersistingL2CacheSize, ...).
inline void l2_setaside(std::size_t bytes) {
  char text[64];
  std::snprintf(text, sizeof text, "l2.setaside bytes=%zu", bytes);
  mark(text);
}

// After cudaCtxResetPersistingL2Cache.
inline void l2_reset() { mark("l2.reset"); }

inline const char* access_name(cudaAccessProperty property) {
  if (property == cudaAccessPropertyPersisting) return "persisting";
  return property == cudaAccessPropertyStreaming ? "streaming" : "normal";
}

// Lives as long as this thread launches kernels that run under the window.
class L2Window {
 public:
  explicit L2Window(const cudaAccessPolicyWindow& window) {
    char text[192];
    std::snprintf(text, sizeof text,
                  "l2.window base=%" PRIuPTR " bytes=%zu hit=%.4f hitProp=%s missProp=%s",
                  reinterpret_cast<std::uintptr_t>(window.base_ptr), window.num_bytes,
                  static_cast<double>(window.hitRatio), access_name(window.hitProp),
                  access_name(window.missProp));
    const nvtxEventAttributes_t attributes = event(text);
    nvtxDomainRangePushEx(domain(), &attributes);
  }
  ~L2Window() { nvtxDomainRangePop(domain()); }
  L2Window(const L2Window&) = delete;
  L2Window& operator=(const L2Window&) = delete;
};

}  // namespace streamlint
