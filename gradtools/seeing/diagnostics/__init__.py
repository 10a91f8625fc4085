"""Where a gradient is lost, why, and how to mend it: `why_zero`, `dependence`, guards."""
