"""C++ for inner loops on CPUs (class head, exact search), compiled on demand; without a compiler, PyTorch works."""
