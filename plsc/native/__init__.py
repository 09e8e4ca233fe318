"""C++ for the class head's inner loops on CPUs, compiled on demand; without a compiler, PyTorch does the work."""
