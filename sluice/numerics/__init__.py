"""Kernels that trainer and engine must share bit for bit."""
