"""Where a gradient is lost, why, and how to fix it: `why_zero`, `dependence`, guards."""
