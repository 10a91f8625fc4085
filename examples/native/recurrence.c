/* Computes y[t] = a[t] y[t-1] + x[t] with y[-1] = 0, and the transpose in x. Rows are examples. */

#include <stddef.h>

void recurrence(size_t rows, size_t n, const double *a, const double *x, double *y)
{
    for (size_t row = 0; row < rows; row++, a += n, x += n, y += n) {
        double last = 0.0;
        for (size_t t = 0; t < n; t++)
            y[t] = last = a[t] * last + x[t];
    }
}

void adjoint(size_t rows, size_t n, const double *a, const double *c, double *lambda)
{
    for (size_t row = 0; row < rows; row++, a += n, c += n, lambda += n) {
        double next = 0.0;
        for (size_t t = n; t-- > 0;) {
            lambda[t] = c[t] + next;
            next = a[t] * lambda[t];
        }
    }
}
