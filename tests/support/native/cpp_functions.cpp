// Defines x^3 by three C++ torch::autograd::Functions. One is correct at any order. The gradients
// of the other two are not differentiable, because of a NoGradGuard and a detached tensor.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

struct Right : public Function<Right> {
  static Tensor forward(AutogradContext* ctx, Tensor x) {
    ctx->save_for_backward({x});
    return x * x * x;
  }
  static variable_list backward(AutogradContext* ctx, variable_list cts) {
    auto x = ctx->get_saved_variables()[0];
    return {3 * x * x * cts[0]};
  }
};

struct Unrecorded : public Function<Unrecorded> {
  static Tensor forward(AutogradContext* ctx, Tensor x) { return Right::forward(ctx, x); }
  static variable_list backward(AutogradContext* ctx, variable_list cts) {
    at::NoGradGuard unrecorded;
    return Right::backward(ctx, cts);
  }
};

struct Detached : public Function<Detached> {
  static Tensor forward(AutogradContext* ctx, Tensor x) {
    ctx->saved_data["x"] = x.detach();
    return x * x * x;
  }
  static variable_list backward(AutogradContext* ctx, variable_list cts) {
    auto x = ctx->saved_data["x"].toTensor();
    return {3 * x * x * cts[0]};
  }
};

Tensor right(Tensor x) { return Right::apply(x); }
Tensor unrecorded(Tensor x) { return Unrecorded::apply(x); }
Tensor detached(Tensor x) { return Detached::apply(x); }

TORCH_LIBRARY(cpp_functions, m) {
  m.def("right(Tensor x) -> Tensor");
  m.def("unrecorded(Tensor x) -> Tensor");
  m.def("detached(Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(cpp_functions, CompositeImplicitAutograd, m) { m.impl("right", right); }
TORCH_LIBRARY_IMPL(cpp_functions, Autograd, m) {
  m.impl("unrecorded", unrecorded);
  m.impl("detached", detached);
}
