// Soft dynamic time warping: the softened cost of the best monotone path through a table D.
// The extension computes the value, the gradient, and the product of the Hessian with a direction.
// The program is a template over the number type; with dual numbers its gradient contains the
// Hessian product. Tables have dtype double and shape (examples, rows, columns). Reference: Cuturi
// and Blondel, Soft-DTW, 2017.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <vector>

namespace {

struct Dual {  // v + e d with e^2 = 0
    double v, d;
    Dual(double v = 0.0, double d = 0.0) : v(v), d(d) {}
};
Dual operator+(Dual a, Dual b) { return {a.v + b.v, a.d + b.d}; }
Dual operator-(Dual a, Dual b) { return {a.v - b.v, a.d - b.d}; }
Dual operator*(Dual a, Dual b) { return {a.v * b.v, a.d * b.v + a.v * b.d}; }
Dual operator/(Dual a, Dual b) { return {a.v / b.v, (a.d - a.v / b.v * b.d) / b.v}; }
Dual exp(Dual a) { return {std::exp(a.v), a.d * std::exp(a.v)}; }
Dual log(Dual a) { return {std::log(a.v), a.d / a.v}; }
double value(Dual a) { return a.v; }
double value(double a) { return a; }

template <class Number>
struct Program {
    int64_t n, m;
    double gamma;
    std::vector<Number> weights;  // weights of the three predecessors of each cell
    Number total;

    template <class Table>
    Program(int64_t n, int64_t m, double gamma, Table cost)
        : n(n), m(m), gamma(gamma), weights(3 * n * m)
    {
        using std::exp;
        using std::log;
        const double inf = std::numeric_limits<double>::infinity();
        std::vector<Number> sum((n + 1) * (m + 1), Number(inf));
        sum[0] = Number(0.0);
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < m; j++) {
                Number *corner = &sum[i * (m + 1) + j];
                Number ways[3] = {corner[0], corner[1], corner[m + 1]};
                double least = inf;
                for (Number way : ways) least = std::min(least, value(way));
                Number all(0.0), *w = &weights[3 * (i * m + j)];
                for (int k = 0; k < 3; k++) {
                    w[k] = std::isinf(value(ways[k]))
                        ? Number(0.0) : exp((Number(least) - ways[k]) * Number(1.0 / gamma));
                    all = all + w[k];
                }
                for (int k = 0; k < 3; k++) w[k] = w[k] / all;
                corner[m + 2] = cost(i, j) + Number(least) - Number(gamma) * log(all);
            }
        total = sum.back();
    }

    std::vector<Number> gradient() const
    {
        std::vector<Number> reach((n + 1) * (m + 1), Number(0.0));
        reach.back() = Number(1.0);
        for (int64_t i = n; i-- > 0;)
            for (int64_t j = m; j-- > 0;) {
                const Number here = reach[(i + 1) * (m + 1) + j + 1];
                const Number *w = &weights[3 * (i * m + j)];
                Number *corner = &reach[i * (m + 1) + j];
                corner[0] = corner[0] + here * w[0];
                corner[1] = corner[1] + here * w[1];
                corner[m + 1] = corner[m + 1] + here * w[2];
            }
        std::vector<Number> found;
        for (int64_t i = 0; i < n; i++)
            for (int64_t j = 0; j < m; j++) found.push_back(reach[(i + 1) * (m + 1) + j + 1]);
        return found;
    }
};

at::Tensor cost(const at::Tensor &D, double gamma)
{
    const int64_t n = D.size(-2), m = D.size(-1);
    at::Tensor out = at::empty(D.sizes().slice(0, D.dim() - 2), D.options());
    const double *d = D.const_data_ptr<double>();
    for (int64_t b = 0; b < out.numel(); b++, d += n * m)
        out.mutable_data_ptr<double>()[b] =
            Program<double>(n, m, gamma, [=](int64_t i, int64_t j) { return d[i * m + j]; }).total;
    return out;
}

at::Tensor gradient(const at::Tensor &D, double gamma)
{
    const int64_t n = D.size(-2), m = D.size(-1);
    at::Tensor out = at::empty_like(D);
    const double *d = D.const_data_ptr<double>();
    double *o = out.mutable_data_ptr<double>();
    for (const double *end = d + D.numel(); d < end; d += n * m) {
        Program<double> program(n, m, gamma, [=](int64_t i, int64_t j) { return d[i * m + j]; });
        for (double g : program.gradient()) *o++ = g;
    }
    return out;
}

at::Tensor hessian_product(const at::Tensor &D, const at::Tensor &T, double gamma)
{
    const int64_t n = D.size(-2), m = D.size(-1);
    at::Tensor out = at::empty_like(D);
    const double *d = D.const_data_ptr<double>(), *t = T.const_data_ptr<double>();
    double *o = out.mutable_data_ptr<double>();
    for (const double *end = d + D.numel(); d < end; d += n * m, t += n * m) {
        Program<Dual> program(n, m, gamma, [=](int64_t i, int64_t j) {
            return Dual(d[i * m + j], t[i * m + j]);
        });
        for (Dual g : program.gradient()) *o++ = g.d;
    }
    return out;
}

}  // namespace

TORCH_LIBRARY(soft_dtw, library)
{
    library.def("cost(Tensor D, float gamma) -> Tensor", &cost);
    library.def("gradient(Tensor D, float gamma) -> Tensor", &gradient);
    library.def("hessian_product(Tensor D, Tensor T, float gamma) -> Tensor", &hessian_product);
}
