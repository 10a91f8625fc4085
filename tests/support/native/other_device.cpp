// Simulates a device other than the CPU on any machine: PyTorch's PrivateUse1 in host memory.
//
// CPU kernels run on aliases of the device's memory. As on a GPU, operands on two devices, a
// generator of another device, and host pointers to tensors raise an error. The device counts host
// synchronizations: each copy to the host and each number that the host reads. As for CUDA,
// autograd runs the nodes of this device in a separate thread.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>

using at::Tensor;
using c10::IValue;
constexpr auto OTHER = c10::DeviceType::PrivateUse1;

namespace {

std::atomic<int64_t> waits{0};
std::atomic<bool> refused{false};
thread_local c10::StreamId standing = 0;  // The current stream of this thread.
std::atomic<c10::StreamId> expected{-1};  // The expected stream of all kernels, or -1.
std::atomic<int64_t> strays{0};

void wait(const char* what) {
  TORCH_CHECK(!refused, "the host waits for the device: ", what);
  ++waits;
}

void run_here() {
  if (expected >= 0 && standing != expected) ++strays;
}

// --- the device's memory, streams and random numbers -----------------------------------------

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? std::malloc(bytes) : nullptr;
    return {data, data, &std::free, c10::Device(OTHER, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};
Memory memory;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = OTHER;
  c10::Device here() const { return {OTHER, 0}; }
  c10::Stream stream() const { return c10::Stream(c10::Stream::UNSAFE, here(), standing); }
  c10::DeviceType type() const override { return OTHER; }
  c10::Device exchangeDevice(c10::Device) const override { return here(); }
  c10::Device getDevice() const override { return here(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream to) const noexcept override {
    auto before = stream();
    standing = to.id();
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Random final : c10::GeneratorImpl {  // Draws numbers with a separate CPU generator.
  at::Generator inner;
  explicit Random(at::Generator g)
      : GeneratorImpl(c10::Device(OTHER, 0), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(std::move(g)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  Random* clone_impl() const override { return new Random(inner.clone()); }
};

const at::Generator& default_generator() {
  static auto made = at::make_generator<Random>(at::detail::createCPUGenerator(0));
  return made;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Random>(at::detail::createCPUGenerator());
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto fresh = memory.allocate(bytes);
    auto kept = std::min(bytes, storage.nbytes());
    if (kept) memory.copy_data(fresh.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

// --- CPU kernels on the memory of the device ---------------------------------------------------

bool other(const Tensor& x) { return x.defined() && x.device().type() == OTHER; }

Tensor on_host(const Tensor& x) {  // Returns a CPU tensor that shares the memory of x.
  auto cpu = x.options().device(at::kCPU);
  if (!x.numel()) return at::empty_strided(x.sizes(), x.strides(), cpu);
  auto made = at::from_blob(const_cast<void*>(x.const_data_ptr()), x.sizes(), x.strides(), cpu);
  if (x.is_conj()) made._set_conj(true);
  if (x.is_neg()) made._set_neg(true);
  return made;
}

Tensor fresh(const Tensor& cpu) {
  auto made = at::empty_strided(cpu.sizes(), cpu.strides(), cpu.options().device(c10::Device(OTHER, 0)));
  on_host(made).copy_(cpu);
  return made;
}

struct Call {
  const c10::OperatorHandle& op;
  std::vector<std::pair<Tensor, Tensor>> known;  // The tensors of the device and their CPU aliases.
  std::vector<Tensor> foreign;

  std::string name() const { return op.schema().name(); }

  Tensor in(const Tensor& x) {
    if (!x.defined()) return x;
    if (!other(x)) {
      if (x.dim()) foreign.push_back(x);
      return x;
    }
    for (auto& [device, cpu] : known)
      if (device.is_same(x)) return cpu;
    known.emplace_back(x, on_host(x));
    return known.back().second;
  }

  Tensor out(const Tensor& x) {
    if (!x.defined()) return x;
    for (auto& [device, cpu] : known) {
      if (cpu.is_same(x)) return device;
      TORCH_CHECK(!x.numel() || !cpu.numel() || !x.is_alias_of(cpu), name(), " gives a view");
    }
    return fresh(x);
  }

  void resized() {  // Resizes outputs whose shape a kernel has changed.
    for (auto& [device, cpu] : known) {
      if (device.sizes() == cpu.sizes()) continue;
      device.resize_(cpu.sizes());
      on_host(device).copy_(cpu);
    }
  }

  void check() const {
    TORCH_CHECK(
        known.empty() || foreign.empty(), "Expected all tensors to be on the same device, but ",
        name(), " got some on ", known.front().first.device(), " and some on the CPU");
  }
};

IValue generator(const IValue& given) {
  if (given.isNone()) return default_generator().get<Random>()->inner;
  auto g = given.toGenerator();
  TORCH_CHECK(g.device().type() == OTHER, "Expected a generator of the device, got one of ",
              g.device());
  return g.get<Random>()->inner;
}

template <class F>
IValue mapped(const IValue& v, F f) {
  if (v.isTensor()) return f(v.toTensor());
  if (v.isTensorList()) {
    std::vector<Tensor> all;
    for (const Tensor& x : v.toTensorVector()) all.push_back(f(x));
    return all;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> all;
    for (const auto& x : v.toOptionalTensorList()) {
      std::optional<Tensor> one = x;
      all.push_back(one ? std::optional<Tensor>(f(*one)) : one);
    }
    return all;
  }
  return v;
}

void by_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  run_here();
  Call call{op, {}, {}};
  const auto& arguments = op.schema().arguments();
  const auto begin = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    IValue& v = (*stack)[begin + i];
    const auto type = arguments[i].type()->annotation_str();
    if (v.isDevice() && v.toDevice().type() == OTHER) v = c10::Device(at::kCPU);
    else if (type == "Optional[Generator]" || type == "Generator") v = generator(v);
    else v = mapped(v, [&](const Tensor& x) { return call.in(x); });
  }
  call.check();
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.resized();
  const auto first = stack->size() - op.schema().returns().size();
  for (size_t i = first; i < stack->size(); ++i)
    (*stack)[i] = mapped((*stack)[i], [&](const Tensor& x) { return call.out(x); });
}

// --- operations without a CPU kernel, and operations that must not copy ------------------------

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

Tensor copied(const Tensor& from, const Tensor& to, bool) {
  run_here();
  if (other(from) && !other(to)) wait("a copy to the host");
  auto target = other(to) ? on_host(to) : to;
  target.copy_(other(from) ? on_host(from) : from);
  return to;
}

Tensor copied_and_resized(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copied(from, to, false);
}

at::Scalar read(const Tensor& x) {
  wait("a number that is read");
  return on_host(x).item();
}

const Tensor& resize(
    const Tensor& x, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = x.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  auto bytes = (x.storage_offset() + x.numel()) * x.itemsize();
  if (bytes > x.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(x.storage(), bytes);
  return x;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copied);
  m.impl("_copy_from_and_resize", copied_and_resized);
  m.impl("_local_scalar_dense", read);
  m.impl("resize_", resize);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
}

}  // namespace

TORCH_LIBRARY(other_device, m) {
  m.def("start() -> ()", [] {
    c10::SetAllocator(OTHER, &memory);
    at::RegisterPrivateUse1HooksInterface(new Hooks());
  });
  m.def("random() -> Tensor", [] { return default_generator().get_state(); });
  m.def("set_random(Tensor state) -> ()", [](const Tensor& state) {
    auto g = default_generator();
    g.set_state(state);
  });
  m.def("seed(int seed) -> ()", [](int64_t seed) {
    auto g = default_generator();
    g.set_current_seed(seed);
  });
  m.def("waits() -> int", [] { return waits.load(); });
  m.def("refuse_waits(bool refuse) -> ()", [](bool refuse) { refused = refuse; });
  m.def("enter_stream(int stream) -> ()", [](int64_t stream) { standing = stream; });
  m.def("expect_stream(int stream) -> ()", [](int64_t stream) { expected = stream; });
  m.def("strays() -> int", [] { return strays.load(); });
}
