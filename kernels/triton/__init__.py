"""Triton kernels of the rival paths, one idea a file. Importing one needs Triton; on CPU tensors also TRITON_INTERPRET=1 before that."""
