"""Three ways to run a program: NumPy, the CUDA text on the CPU, and a GPU."""
