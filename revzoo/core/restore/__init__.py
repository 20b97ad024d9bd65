"""The conditions of a forward pass, captured and restored for its replay."""
