// The exact scan's products of rows of 8-bit codes and queries of two 7-bit digits, in int32, by the units of a
// processor: matrix tiles (AMX int8), dot products of four bytes (AVX-512 or AVX VNNI, NEON), pairs of bytes (AVX2,
// AVX-512 BW) or plain integers.
//
// A row is bytes c + 128, c in [-127, 127]. A query is two digits, Q = 128·high + low, each in [-64, 63]: AVX2 adds two
// products of a byte and a digit in 16 bits with saturation, and 2·255·64 still fits. Sums (kBlock, 2·kPanel) hold the
// products with the high digits of kPanel queries, then those with the low ones. Where `kOffset` is 128, a sum counts
// each c as c + 128; who uses the sums takes 128 · (sum of the digits) off.
#pragma once

#include "scan_products.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

namespace {

typedef int32_t Integers __attribute__((vector_size(kLanes * 4)));

// Four bytes of a row and four of a digit in each lane: their products are added to an int32.
struct ByteUnit {
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
    static constexpr const char* kName = "avx512-vnni";
    static constexpr int kOffset = 128;
    static Integers multiply_add(Integers sum, Words row, Words digit) {
        return (Integers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)row, (__m512i)digit);
    }
#elif defined(__AVX512BW__)
    static constexpr const char* kName = "avx512";
    static constexpr int kOffset = 128;
    static Integers multiply_add(Integers sum, Words row, Words digit) {
        const __m512i pairs = _mm512_maddubs_epi16((__m512i)row, (__m512i)digit);
        return sum + (Integers)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
    }
#elif defined(__AVXVNNI__) && defined(__AVX2__) && !defined(__AVX512F__)
    static constexpr const char* kName = "avx2-vnni";
    static constexpr int kOffset = 128;
    static Integers multiply_add(Integers sum, Words row, Words digit) {
        return (Integers)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)row, (__m256i)digit);
    }
#elif defined(__AVX2__) && !defined(__AVX512F__)
    static constexpr const char* kName = "avx2";
    static constexpr int kOffset = 128;
    static Integers multiply_add(Integers sum, Words row, Words digit) {
        const __m256i pairs = _mm256_maddubs_epi16((__m256i)row, (__m256i)digit);
        return sum + (Integers)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
#elif defined(__ARM_FEATURE_DOTPROD)
    static constexpr const char* kName = "neon-dot";
    static constexpr int kOffset = 0;
    static Integers multiply_add(Integers sum, Words row, Words digit) {
        const Words signed_codes = row ^ 0x80808080u;
        return (Integers)vdotq_s32((int32x4_t)sum, (int8x16_t)signed_codes, (int8x16_t)digit);
    }
#else
    static constexpr const char* kName = "portable";
    static constexpr int kOffset = 128;
    static Integers multiply_add(Integers sum, Words row, Words digit) {
        for (int shift = 0; shift < 32; shift += 8)
            sum += Integers(row >> shift & 0xFFu) * (Integers(digit << (24 - shift)) >> 24);
        return sum;
    }
#endif
};

struct CodeProducts {
    using Number = uint8_t;
    using Factor = uint8_t;
    static constexpr const char* kName = ByteUnit::kName;
    static constexpr int kOffset = ByteUnit::kOffset, kTogether = 4;
    static constexpr int64_t kBlock = kMostRows, kFew = kLanes == 16 ? 4 : 2;
    static constexpr int64_t kStrip = kWide / 2;  // queries whose two digits fill the registers of one row's sums

    static void begin() {}
    static void end() {}

    // (count, 2, stride), count a multiple of kPanel, to as many bytes: strips of kStrip queries; in each, for four
    // bytes after the other, registers of the high and of the low digits in turn.
    static void pack(const int8_t* digits, int64_t count, int64_t stride, int8_t* out) {
        for (int64_t strip = 0; strip < count; strip += kStrip)
            for (int64_t d = 0; d < stride; d += kTogether)
                for (int v = 0; v < kAcross; v++)
                    for (int64_t lane = 0; lane < kLanes; lane++, out += kTogether) {
                        const int64_t query = strip + v / 2 * kLanes + lane;
                        std::memcpy(out, digits + (2 * query + v % 2) * stride + d, kTogether);
                    }
    }

    // Sums of kBlock rows and `width` queries of a packed panel; with the next block's rows `ahead` on their way.
    static void multiply(const uint8_t* rows, int64_t row_stride, const int8_t* panel, int64_t stride, int64_t width,
                         bool ahead, int32_t* sums) {
        for (int64_t low = 0; low < std::min(width, kPanel); low += kStrip, ahead = false)
            for (int64_t r = 0; r < kBlock; r += kRows)
                multiply_rows(rows + r * row_stride, row_stride, panel + low * 2 * stride, stride, ahead,
                              sums + r * 2 * kPanel + low);
    }

    // Sums of four rows, wherever they lie, and few queries (count, 2, stride) as they are.
    static void multiply_four(const uint8_t* const* row, const int8_t* digits, int64_t count, int64_t stride,
                              int32_t* sums) {
        constexpr int together = kLanes == 16 ? 2 : 1;  // as the registers hold the sums of
        for (; count >= together; count -= together, digits += together * 2 * stride, sums += together)
            multiply_few<together>(row, digits, stride, sums);
        if (count) multiply_few<1>(row, digits, stride, sums);
    }

private:
    static void multiply_rows(const uint8_t* rows, int64_t row_stride, const int8_t* strip, int64_t stride, bool ahead,
                              int32_t* out) {
        Integers sums[kRows][kAcross] = {};
        for (int64_t start = 0; start < stride; start += kLineBytes) {
            if (ahead)
                for (int64_t r = kBlock; r < kBlock + kRows; r++) __builtin_prefetch(rows + r * row_stride + start, 0, 2);
#pragma GCC unroll 2
            for (int64_t d = start; d < start + kLineBytes; d += kTogether, strip += 2 * kStrip * kTogether) {
                Words right[kAcross];
                for (int v = 0; v < kAcross; v++) right[v] = read<Words>(strip + v * kLanes * kTogether);
#pragma GCC unroll 12
                for (int r = 0; r < kRows; r++) {
                    const Words left = read<uint32_t>(rows + r * row_stride + d) - Words{};
                    for (int v = 0; v < kAcross; v++) sums[r][v] = ByteUnit::multiply_add(sums[r][v], left, right[v]);
                }
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < kRows; r++)
            for (int v = 0; v < kAcross; v++)
                std::memcpy(out + r * 2 * kPanel + v % 2 * kPanel + v / 2 * kLanes, &sums[r][v], sizeof sums[r][v]);
    }

    template <int count>
    static void multiply_few(const uint8_t* const* row, const int8_t* digits, int64_t stride, int32_t* out) {
        Integers sums[kFour][2 * count] = {};
        for (int64_t d = 0; d < stride; d += kLanes * kTogether) {
            Words codes[kFour];
            for (int r = 0; r < kFour; r++) codes[r] = read<Words>(row[r] + d);
            for (int j = 0; j < 2 * count; j++) {
                const Words digit = read<Words>(digits + j * stride + d);
                for (int r = 0; r < kFour; r++) sums[r][j] = ByteUnit::multiply_add(sums[r][j], codes[r], digit);
            }
        }
        for (int r = 0; r < kFour; r++)
            for (int j = 0; j < 2 * count; j++) {
                int32_t total = 0;
                for (int lane = 0; lane < kLanes; lane++) total += sums[r][j][lane];
                out[r * 2 * kPanel + j % 2 * kPanel + j / 2] = total;
            }
    }
};

#if defined(PLSC_TILES) && defined(__AMX_INT8__)
#define PLSC_BYTE_TILES 1

// The same by matrix tiles, for more than few queries: 32 rows by both digits of 16 queries at a time.
struct TileCodeProducts : CodeProducts {
    static constexpr const char* kName = "amx-int8";
    static constexpr int kOffset = 128;
    static constexpr int64_t kBlock = 32;
    static constexpr int64_t kAhead = 128;  // rows, the distance at which rows are prefetched

    static void begin() { configure_tiles(); }
    static void end() { _tile_release(); }

    static void multiply(const uint8_t* rows, int64_t row_stride, const int8_t* panel, int64_t stride, int64_t width,
                         bool ahead, int32_t* sums) {
        for (int64_t low = 0; low < std::min(width, kPanel); low += kStrip, ahead = false)
            multiply_block(rows, row_stride, panel + low * 2 * stride, stride, ahead, sums + low);
    }

private:
    static void multiply_block(const uint8_t* rows, int64_t row_stride, const int8_t* strip, int64_t stride, bool ahead,
                               int32_t* out) {
        constexpr int64_t bytes = 2 * kPanel * 4;
        clear_sums();
        for (int64_t d = 0; d < stride; d += kLineBytes, strip += 2 * kStrip * kLineBytes) {
            if (ahead)
                for (int64_t r = kAhead; r < kAhead + kBlock; r++) __builtin_prefetch(rows + r * row_stride + d, 0, 2);
            _tile_loadd(4, rows + d, row_stride);
            _tile_loadd(5, rows + 16 * row_stride + d, row_stride);
            _tile_loadd(6, strip, 2 * kLineBytes);
            _tile_loadd(7, strip + kLineBytes, 2 * kLineBytes);
            _tile_dpbusd(0, 4, 6);
            _tile_dpbusd(1, 4, 7);
            _tile_dpbusd(2, 5, 6);
            _tile_dpbusd(3, 5, 7);
        }
        _tile_stored(0, out, bytes);
        _tile_stored(1, out + kPanel, bytes);
        _tile_stored(2, out + 16 * 2 * kPanel, bytes);
        _tile_stored(3, out + 16 * 2 * kPanel + kPanel, bytes);
    }
};

#endif

}  // namespace
