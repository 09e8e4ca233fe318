"""How many classes a pass has in hand at a time, where nobody chose."""

_CPU_CHUNK_BYTES = 4 << 20  # of one float32 (classes, B) block: in cache
_GPU_CHUNK_BYTES = 512 << 20  # of all that a chunk needs: 64k classes at B = D = 512, where launches cost nothing
_GPU_CHUNK_STEP = 1024  # whole blocks of every kernel, so that sums over classes are grouped alike in every chunk


def default_chunk_size(batch: int, dim: int, centers: int, device_type: str) -> int:
    """Classes per chunk for ``batch`` samples where nobody chose: what keeps a chunk's block within its budget."""
    if device_type == "cuda":
        logits, gradients = 6 * batch, 8 * dim  # float32 and bfloat16; float32, this chunk's and the last one's
        fitting = _GPU_CHUNK_BYTES // ((logits + gradients) * centers)
        return max(fitting // _GPU_CHUNK_STEP, 1) * _GPU_CHUNK_STEP
    return max(_CPU_CHUNK_BYTES // (4 * max(batch, dim // 2) * centers), 256)
