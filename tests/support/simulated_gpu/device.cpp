// The C++ half of a simulated GPU: what torch asks of a device before any tensor is on it.
//
// A build of torch without CUDA refuses "cuda" where autograd looks for the device's guard, and where
// pinned memory is asked for. Here both exist. The guard has one device and one stream. Pinned memory
// is ordinary memory, filled with a pattern when it is taken: code that reads it before a copy has
// arrived reads neither zeros nor the right values.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>

namespace {

constexpr int kNotWritten = 0xAB;

std::mutex& lock() {
  static auto* made = new std::mutex;
  return *made;
}

// The bytes of each block of pinned memory, by its first address.
std::map<const char*, size_t>& blocks() {
  static auto* made = new std::map<const char*, size_t>;
  return *made;
}

struct PinnedAllocator final : c10::Allocator {
  static void release(void* start) {
    std::lock_guard<std::mutex> guard(lock());
    blocks().erase(static_cast<char*>(start));
    std::free(start);
  }

  c10::DataPtr allocate(size_t bytes) override {
    void* start = nullptr;
    if (posix_memalign(&start, 64, bytes == 0 ? 64 : bytes) != 0) {
      throw std::bad_alloc();
    }
    std::memset(start, kNotWritten, bytes);
    std::lock_guard<std::mutex> guard(lock());
    blocks()[static_cast<char*>(start)] = bytes;
    return {start, start, &release, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

}  // namespace

namespace at {

// torch finds this class by its name.
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void deviceSynchronize(DeviceIndex) const override {}

  const Generator& getDefaultGenerator(DeviceIndex) const override {
    return detail::getDefaultCPUGenerator();
  }

  Generator getNewGenerator(DeviceIndex) const override {
    return detail::createCPUGenerator();
  }

  Allocator* getPinnedMemoryAllocator() const override {
    static auto* allocator = new PinnedAllocator;
    return allocator;
  }

  bool isPinnedPtr(const void* start) const override {
    std::lock_guard<std::mutex> guard(lock());
    auto next = blocks().upper_bound(static_cast<const char*>(start));
    if (next == blocks().begin()) {
      return false;
    }
    --next;
    return static_cast<const char*>(start) < next->first + next->second;
  }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

namespace c10::impl {

struct SimulatedGuard final : DeviceGuardImplInterface {
  static Device here() { return Device(DeviceType::CUDA, 0); }
  static Stream only() { return Stream(Stream::DEFAULT, here()); }
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return here(); }
  Device getDevice() const override { return here(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return only(); }
  Stream getDefaultStream(Device) const override { return only(); }
  Stream getNewStream(Device, int) const override { return only(); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return only(); }
  Stream exchangeStream(Stream) const override { return only(); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, DeviceIndex, EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(DeviceIndex) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, SimulatedGuard)

}  // namespace c10::impl
