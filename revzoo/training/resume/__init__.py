"""Exact resumes and safe kills; docs/decisions/008-runs-that-can-be-stopped.md says why."""
