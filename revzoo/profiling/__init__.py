"""Memory and time of training steps: audits, plans, benchmarks."""
