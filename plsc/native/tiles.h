// Shared by both libraries: the bf16 number, the processor's matrix tiles (AMX) where it has them, the fingerprint.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define PLSC_TILES 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

using bf16 = uint16_t;

inline float widen(bf16 value) {
    uint32_t bits = uint32_t(value) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

// Ask the system for the matrix tiles; true if the processor has them and this process may use them.
inline bool tiles_are_allowed() {
#ifdef PLSC_TILES
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

#ifdef PLSC_TILES

// The operand of ldtilecfg: all eight tiles are 16 rows of 64 bytes, that is 16x16 float32 or 16x32 bf16.
struct TileShapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
};
// Static, because GCC 12 takes the instruction to read eight bytes and would not store the rest of a local one.
const TileShapes kTileShapes = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

inline void configure_tiles() { _tile_loadconfig(&kTileShapes); }

// The four tiles of sums, 0 to 3, become zero.
inline void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

// x (B, D) as the right factor of W·xᵀ: pairs along D interleaved, out[B/16][D/32][16][16·2].
inline void pack_column_pairs(const bf16* x, int64_t batch, int64_t dim, bf16* out) {
    for (int64_t b = 0; b < batch; b++)
        for (int64_t d = 0; d < dim; d += 2)
            std::memcpy(out + ((b / 16) * (dim / 32) + d / 32) * 512 + (d % 32) / 2 * 32 + (b % 16) * 2, x + b * dim + d, 4);
}

#endif  // PLSC_TILES

}  // namespace

// The compilation's fingerprint (plsc/native/build.py), by which the loader tells this library from any other.
#ifdef PLSC_FINGERPRINT
extern "C" const char* plsc_fingerprint() { return PLSC_FINGERPRINT; }
#endif
