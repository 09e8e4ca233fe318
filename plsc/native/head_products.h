// The head's matrix products by the units of a processor: matrix tiles (AMX), dot products of bf16 pairs (AVX-512 BF16,
// NEON) or multiply-adds of float32 (AVX-512, AVX2, NEON). The compiler's macros decide which of them exist.
//
// `TileProducts`, `PairProducts` and `FloatProducts` have the same static members; the passes are templates of them. A
// block is kBlock rows of the table; a panel is at most kPanel samples, and as all counts of samples and D a multiple of 32.
//
//   Number                     of both factors; sums are float32
//   pack_columns, pack_rows    lay a right factor out, from rows along or across the sum
//   cosines                    z (kBlock, kPanel) = rows (kBlock, D) · xᵀ (D, width)
//   weigh, add_weighted        pull (width, D) += (ρ z)ᵀ (width, kBlock) · rows (kBlock, D)
//   row_gradients              gradient (kBlock, D) = probability (kBlock, batch) · x (batch, D)
#pragma once

#include <type_traits>

#include "vector_units.h"

namespace {

constexpr int64_t kPanel = 128;  // samples that a block is multiplied by at a time

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

// The nearest bf16 number, ties to even.
inline uint32_t round_to_nearest(float value) {
    const uint32_t bits = bits_of(value);
    return (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
}

template <class Number>
inline Number number_of(float value) { return value; }
template <class Number>
inline Number number_of(bf16 value) {
    if constexpr (sizeof(Number) == sizeof(bf16)) return value;
    else return widen(value);
}

// Products in vector registers ----------------------------------------------------------------------------------------

// c (rows, kWide) = [c +] a (rows, depth) · b (depth, kWide), with all sums in registers. `a_step` lies between a's rows,
// or, where a is transposed, between its columns (of kTogether numbers).
template <class Unit, int rows, bool transposed, bool accumulate>
inline void multiply_in_registers(const typename Unit::Number* a, int64_t a_step, const typename Unit::Number* b,
                                  int64_t depth, float* c, int64_t c_stride) {
    constexpr int kTogether = Unit::kTogether;
    Floats sums[rows][kAcross];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < kAcross; v++) {
            if (accumulate) std::memcpy(&sums[r][v], c + r * c_stride + v * kLanes, sizeof(Floats));
            else sums[r][v] = Floats{};
        }
#pragma GCC unroll 1
    for (int64_t k = 0; k < depth; k += kTogether, b += kTogether * kWide) {
        typename Unit::Factor right[kAcross];
#pragma GCC unroll 4
        for (int v = 0; v < kAcross; v++) right[v] = Unit::load(b + v * kLanes * kTogether);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const auto left = Unit::splat(transposed ? a + r * kTogether : a + r * a_step);
#pragma GCC unroll 4
            for (int v = 0; v < kAcross; v++) sums[r][v] = Unit::multiply_add(sums[r][v], left, right[v]);
        }
        a += transposed ? a_step : kTogether;
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < kAcross; v++) std::memcpy(c + r * c_stride + v * kLanes, &sums[r][v], sizeof(Floats));
}

// c (m, n) = [c +] a (m, depth) · b (depth, n), m a multiple of 4 and n of 32.
template <class Unit, bool transposed, bool accumulate>
void multiply(const typename Unit::Number* a, int64_t a_step, const typename Unit::Number* b, int64_t depth, float* c,
              int64_t c_stride, int64_t m, int64_t n) {
    const int64_t row_step = transposed ? Unit::kTogether : a_step;
    for (int64_t column = 0; column < n; column += kWide, b += depth * kWide) {
        int64_t row = 0;
        const auto multiply_next = [&](auto count) {
            constexpr int rows = decltype(count)::value;
            multiply_in_registers<Unit, rows, transposed, accumulate>(a + row * row_step, a_step, b, depth,
                                                                      c + row * c_stride + column, c_stride);
            row += rows;
        };
        while (row + kRows <= m) multiply_next(std::integral_constant<int, kRows>());
        while (row + kRows / 3 <= m) multiply_next(std::integral_constant<int, kRows / 3>());
    }
}

// The products by `Unit` of blocks of `block` classes, whose rows, factors and sums fit into the second-level cache.
//
// A right factor lies in strips of kWide columns, of which each has the numbers of all rows, kTogether rows together.
template <class Unit, int64_t block>
struct VectorProducts {
    using Number = typename Unit::Number;
    static constexpr const char* kName = Unit::kName;
    static constexpr int64_t kBlock = block, kTogether = Unit::kTogether;

    static void begin() {}
    static void end() {}

    // x (n, dim) as the right factor of a product with its transpose, whose sums run along its rows.
    template <class Source>
    static void pack_columns(const Source* x, int64_t n, int64_t dim, Number* out) {
        for (int64_t i = 0; i < n; i++)
            for (int64_t k = 0; k < dim; k++)
                out[i / kWide * kWide * dim + k / kTogether * kTogether * kWide + i % kWide * kTogether + k % kTogether] =
                    number_of<Number>(x[i * dim + k]);
    }

    // x (n, dim) as the right factor of a product with x itself, whose sums run across its rows.
    template <class Source>
    static void pack_rows(const Source* x, int64_t n, int64_t dim, Number* out) {
        for (int64_t column = 0; column < dim; column += kWide)
            for (int64_t k = 0; k < n; k += kTogether, out += kWide * kTogether) {
                const Source* from = x + k * dim + column;
                if constexpr (kTogether == 2) {
                    interleave(kWide, out, [&](int64_t i) { return from[i]; }, [&](int64_t i) { return from[dim + i]; });
                } else {
                    for (int64_t i = 0; i < kWide; i++) out[i] = number_of<Number>(from[i]);
                }
            }
    }

    static void cosines(const Number* rows, const Number* columns, int64_t dim, int64_t width, float* z) {
        multiply<Unit, false, false>(rows, dim, columns, dim, z, kPanel, kBlock, width);
    }

    // z·ρ as a left factor, transposed: the numbers of kTogether classes, sample by sample.
    static void weigh(const float* z, const float* rho, int64_t width, Number* out) {
        for (int64_t c = 0; c < kBlock; c += kTogether, z += kTogether * kPanel, out += kTogether * kPanel) {
            if constexpr (kTogether == 2) {
                interleave(width, out, [&](int64_t b) { return round_to_nearest(z[b] * rho[c]); },
                           [&](int64_t b) { return round_to_nearest(z[kPanel + b] * rho[c + 1]); });
            } else {
                for (int64_t b = 0; b < width; b++) out[b] = z[b] * rho[c];
            }
        }
    }

    static void add_weighted(const Number* weighted, const Number* packed_rows, int64_t dim, int64_t width, float* pull) {
        multiply<Unit, true, true>(weighted, kTogether * kPanel, packed_rows, kBlock, pull, dim, width, dim);
    }

    static void store(const float* z, int64_t width, Number* out) {
        for (int64_t b = 0; b < width; b++) {
            if constexpr (kTogether == 2) out[b] = Number(round_to_nearest(z[b]));
            else out[b] = z[b];
        }
    }

    static void row_gradients(const Number* probability, const Number* packed, int64_t batch, int64_t dim, float* gradient) {
        multiply<Unit, false, false>(probability, batch, packed, batch, gradient, dim, kBlock, dim);
    }

private:
    // out[2i], out[2i + 1] = even(i), odd(i)
    template <class Even, class Odd>
    static void interleave(int64_t n, Number* out, const Even& even, const Odd& odd) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) {
            const uint32_t pair = uint32_t(even(i)) | uint32_t(odd(i)) << 16;
            std::memcpy(out + 2 * i, &pair, 4);
        }
    }
};

using FloatProducts = VectorProducts<FloatUnit, 64>;
#ifdef PLSC_PAIRS
using PairProducts = VectorProducts<PairUnit, 128>;
#endif

#ifdef PLSC_TILES
// Matrix tiles -----------------------------------------------------------------------------------------------------

// c (32, 32) = [c +] a (32, k) · b, where b's tiles, 32 deep and 16 wide, hold pairs of rows interleaved: the tile at
// depth t and column half h is at b + t·depth_step + h·width_step (in elements).
template <bool accumulate>
inline void multiply_32x32(const bf16* a, int64_t a_stride, const bf16* b, int64_t depth_step, int64_t width_step,
                           int64_t depth, float* c, int64_t c_stride) {
    const int64_t a_bytes = a_stride * 2, c_bytes = c_stride * 4;
    if (accumulate) {
        _tile_loadd(0, c, c_bytes);
        _tile_loadd(1, c + 16, c_bytes);
        _tile_loadd(2, c + 16 * c_stride, c_bytes);
        _tile_loadd(3, c + 16 * c_stride + 16, c_bytes);
    } else {
        clear_sums();
    }
    for (int64_t t = 0; t < depth; t++) {
        _tile_loadd(4, a + t * 32, a_bytes);
        _tile_loadd(5, a + 16 * a_stride + t * 32, a_bytes);
        _tile_loadd(6, b + t * depth_step, 64);
        _tile_loadd(7, b + t * depth_step + width_step, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_bytes);
    _tile_stored(1, c + 16, c_bytes);
    _tile_stored(2, c + 16 * c_stride, c_bytes);
    _tile_stored(3, c + 16 * c_stride + 16, c_bytes);
}

// A 16x16 block of float32 (rows c, columns b) times a factor per row, as bf16, transposed: out[b·stride + c].
inline void store_transposed(const float* in, int64_t in_stride, const float* factor, bf16* out, int64_t stride) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    __m512i pairs[8];  // lane b of pairs[i] holds (c = 2i, c = 2i + 1)
    for (int i = 0; i < 8; i++) {
        __m512 even = _mm512_mul_ps(_mm512_loadu_ps(in + 2 * i * in_stride), _mm512_set1_ps(factor[2 * i]));
        __m512 odd = _mm512_mul_ps(_mm512_loadu_ps(in + (2 * i + 1) * in_stride), _mm512_set1_ps(factor[2 * i + 1]));
        pairs[i] = _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
    }
    __m512i a[8], b[8];
    for (int i = 0; i < 4; i++) {
        a[2 * i] = _mm512_unpacklo_epi32(pairs[2 * i], pairs[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(pairs[2 * i], pairs[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
    }
    // b[j] and b[j + 4] hold, in 128-bit lane l, the first and the second half of sample 4l + j
    alignas(64) __m128i low[4], high[4];
    for (int j = 0; j < 4; j++) {
        _mm512_store_si512(low, b[j]);
        _mm512_store_si512(high, b[j + 4]);
        for (int lane = 0; lane < 4; lane++) {
            bf16* row = out + (4 * lane + j) * stride;
            _mm_storeu_si128((__m128i*)row, low[lane]);
            _mm_storeu_si128((__m128i*)(row + 8), high[lane]);
        }
    }
}

// Rows of x (n, columns), n a multiple of 32, as tiles of interleaved row pairs: out[n/32][columns/16][16][16·2].
void pack_row_pairs(const bf16* x, int64_t n, int64_t columns, bf16* out) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                         5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int64_t block = 0; block < n / 32; block++)
        for (int64_t column = 0; column < columns; column += 32) {
            bf16* tiles = out + (block * (columns / 16) + column / 16) * 512;
            for (int64_t pair = 0; pair < 16; pair++) {
                const bf16* row = x + (block * 32 + 2 * pair) * columns + column;
                __m512i even = _mm512_loadu_si512(row), odd = _mm512_loadu_si512(row + columns);
                _mm512_storeu_si512(tiles + pair * 32, _mm512_permutex2var_epi16(even, low, odd));
                _mm512_storeu_si512(tiles + 512 + pair * 32, _mm512_permutex2var_epi16(even, high, odd));
            }
        }
}

struct TileProducts {
    static constexpr const char* kName = "amx";
    using Number = bf16;
    static constexpr int64_t kBlock = 256;

    static void begin() { configure_tiles(); }
    static void end() { _tile_release(); }

    static void pack_columns(const bf16* x, int64_t n, int64_t dim, bf16* out) { pack_column_pairs(x, n, dim, out); }
    static void pack_rows(const bf16* x, int64_t n, int64_t dim, bf16* out) { pack_row_pairs(x, n, dim, out); }

    static void cosines(const bf16* rows, const bf16* columns, int64_t dim, int64_t width, float* z) {
        for (int64_t b = 0; b < width; b += 32)
            for (int64_t c = 0; c < kBlock; c += 32)
                multiply_32x32<false>(rows + c * dim, dim, columns + (b / 16) * dim * 16, 512, dim * 16, dim / 32,
                                      z + c * kPanel + b, kPanel);
    }

    static void weigh(const float* z, const float* rho, int64_t width, bf16* out) {
        for (int64_t c = 0; c < kBlock; c += 16)
            for (int64_t b = 0; b < width; b += 16)
                store_transposed(z + c * kPanel + b, kPanel, rho + c, out + b * kBlock + c, kBlock);
    }

    static void add_weighted(const bf16* weighted, const bf16* packed_rows, int64_t dim, int64_t width, float* pull) {
        for (int64_t d = 0; d < dim; d += 32)
            for (int64_t b = 0; b < width; b += 32)
                multiply_32x32<true>(weighted + b * kBlock, kBlock, packed_rows + (d / 16) * 512, (dim / 16) * 512, 512,
                                     kBlock / 32, pull + b * dim + d, dim);
    }

    static void store(const float* z, int64_t width, bf16* out) {
        for (int64_t b = 0; b < width; b += 32) {
            __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(z + b + 16), _mm512_loadu_ps(z + b));
            _mm512_storeu_si512(out + b, (__m512i)both);
        }
    }

    static void row_gradients(const bf16* probability, const bf16* packed, int64_t batch, int64_t dim, float* gradient) {
        for (int64_t c = 0; c < kBlock; c += 32)
            for (int64_t d = 0; d < dim; d += 32)
                multiply_32x32<false>(probability + c * batch, batch, packed + (d / 16) * 512, (dim / 16) * 512, 512,
                                      batch / 32, gradient + c * dim + d, dim);
    }
};

#endif  // PLSC_TILES

// run(products, number): with the fastest products that this process can use, and a number of the table.
template <class Run>
auto with_products(bool is_bf16, const Run& run) {
#ifdef PLSC_TILES
    static const bool has_tiles = tiles_are_allowed();
    if (is_bf16 && has_tiles) return run(TileProducts(), bf16());
#endif
#ifdef PLSC_PAIRS
    if (is_bf16) return run(PairProducts(), bf16());
#endif
    return is_bf16 ? run(FloatProducts(), bf16()) : run(FloatProducts(), float());
}

}  // namespace
