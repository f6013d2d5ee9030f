"""The same operations in Triton, for NVIDIA GPUs; nothing here waits for the device.

Each file holds kernels and the one launcher that checks shapes. The references they are tested
against are those of `kvc_kernels`. With ``TRITON_INTERPRET=1`` set before the first import they
run on a CPU, which is how they are tested where there is no GPU.
"""
