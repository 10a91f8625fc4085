"""What users' own tests are given, and faults planted in what they pass."""
