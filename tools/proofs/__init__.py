"""Compile kernels, disassemble them, and compare them with what they promise: README.md."""
