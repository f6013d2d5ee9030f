"""The same operations in Triton, for NVIDIA GPUs; nothing here waits for the device.

Each file holds kernels and their launcher; `kvc_kernels` calls it where tensors are on a GPU, and
has the references it is tested against. With ``TRITON_INTERPRET=1`` set before the first import
they run on a CPU, which is how they are tested where there is no GPU.
"""
