// The class head's inner loops on a CPU: exp fused behind bf16 matrix tiles (AMX), and the whole row update.
//
// Compiled on demand by build.py with -march=native; plain C functions, called through ctypes. Shapes: W (rows, D)
// bf16 row-major; x (B, D). B is padded to a multiple of 32 by the caller, D is one already. Rows are visited in
// blocks of 256 classes, samples in panels of 128, so that a block's working set stays in the second-level cache, and so
// that no row's result depends on how callers cut the table.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "tiles.h"

namespace {

constexpr int64_t kBlock = 256;  // classes whose rows and probabilities are worked on together
constexpr int64_t kPanel = 128;  // samples likewise
constexpr float kSmallestNorm = 1e-12f;

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

// exp(x) to 2e-7 (Cephes' polynomial), 0 below -87, NaN for NaN; branch-free, so that loops over it vectorise.
inline float exponential(float x) {
    float clamped = x < -87.0f ? -87.0f : x;
    float shifted = clamped * 1.44269504f + 12582912.0f;  // adding 1.5·2^23 rounds to an integer
    float n = shifted - 12582912.0f;
    float r = clamped - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t power = (bits_of(shifted) + (127u - 0x4B400000u)) << 23;
    float scale;
    std::memcpy(&scale, &power, 4);
    return x < -87.0f ? 0.0f : p * scale;
}

// random_bits.py's generator: a pure function of (key of seed and step, global row, column).
inline uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ (x >> 16);
}

inline uint32_t row_key(int64_t row, uint32_t key) {
    uint32_t high = uint32_t(uint64_t(row >> 32) * 0x9E3779B9u);
    return mix((uint32_t(row) ^ key) + high);
}

// Which table rows a call visits: `index` where given, else consecutive ones from `first`.
struct Visit {
    const int64_t* index;
    int64_t first;
    int64_t row(int64_t i) const { return index ? index[i] : first + i; }
};

#ifdef PLSC_TILES

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
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
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

// A block's rows: in place where all 256 follow each other, else copied and filled up with zeros.
struct BlockRows {
    std::vector<bf16> copy;
    std::vector<float> inverse_norm = std::vector<float>(kBlock);

    const bf16* load(const bf16* table, const float* inverse, const Visit& visit, int64_t start, int64_t count,
                     int64_t dim) {
        for (int64_t c = 0; c < kBlock; c++) inverse_norm[c] = c < count ? inverse[visit.row(start + c)] : 0.0f;
        if (!visit.index && count == kBlock) return table + visit.row(start) * dim;
        copy.resize(kBlock * dim);
        for (int64_t c = 0; c < count; c++)
            std::memcpy(copy.data() + c * dim, table + visit.row(start + c) * dim, dim * 2);
        std::memset(copy.data() + count * dim, 0, (kBlock - count) * dim * 2);
        return copy.data();
    }
};

// z (256, panel) = rows · xᵀ for one panel of samples.
void multiply_panel(const bf16* rows, const bf16* columns_of_x, int64_t dim, int64_t width, float* z) {
    for (int64_t b = 0; b < width; b += 32)
        for (int64_t c = 0; c < kBlock; c += 32)
            multiply_32x32<false>(rows + c * dim, dim, columns_of_x + (b / 16) * dim * 16, 512, dim * 16, dim / 32,
                                  z + c * kPanel + b, kPanel);
}

#endif  // PLSC_TILES

inline bf16 round_stochastically(float value, uint32_t bits16) { return bf16((bits_of(value) + bits16) >> 16); }

// Storage of rows: W and the momentum in float32 or bf16, the momentum also as int8 with a scale per row.
enum Kind { kNone = 0, kFloat = 1, kBfloat16 = 2, kInt8 = 3 };

template <Kind kind>
inline void read_row(const void* table, int64_t offset, int64_t dim, float scale, float* row) {
#pragma omp simd
    for (int64_t d = 0; d < dim; d++) {
        if constexpr (kind == kFloat) row[d] = static_cast<const float*>(table)[offset + d];
        if constexpr (kind == kBfloat16) row[d] = widen(static_cast<const bf16*>(table)[offset + d]);
        if constexpr (kind == kInt8) row[d] = static_cast<const int8_t*>(table)[offset + d] * scale;
    }
}

// Store a row, rounded by 16 of each element's random bits: the low ones (shift 0) or the high ones (shift 16).
template <Kind kind>
inline void write_row(void* table, int64_t offset, int64_t dim, const uint32_t* bits, int shift, float* scale, float* row) {
    float steps_per_unit = 1.0f;
    if constexpr (kind == kInt8) {
        float largest = 0.0f;
#pragma omp simd reduction(max : largest)
        for (int64_t d = 0; d < dim; d++) largest = std::fabs(row[d]) > largest ? std::fabs(row[d]) : largest;
        *scale = largest / 127.0f;
        steps_per_unit = 1.0f / std::max(*scale, std::numeric_limits<float>::min());
    }
#pragma omp simd
    for (int64_t d = 0; d < dim; d++) {
        const uint32_t chance = (bits[d] >> shift) & 0xFFFFu;
        if constexpr (kind == kFloat) static_cast<float*>(table)[offset + d] = row[d];
        if constexpr (kind == kBfloat16) static_cast<bf16*>(table)[offset + d] = round_stochastically(row[d], chance);
        if constexpr (kind == kInt8) {
            float value = std::floor(row[d] * steps_per_unit + (float(chance) + 0.5f) * (1.0f / 65536.0f));
            value = value > 127.0f ? 127.0f : value;
            static_cast<int8_t*>(table)[offset + d] = int8_t(value < -127.0f ? -127.0f : value);
        }
    }
}

struct Sgd {
    float factor, rate, momentum, decay;
    int nesterov;
};

struct Table {
    void* weight;
    float* inverse_norm;
    void* state;
    float* state_scale;
    int64_t dim;
};

// `numbers` are the rows' numbers less `first_number` in the whole table, which key their random bits.
template <Kind weight_kind, Kind state_kind>
void update_rows(const Table& table, const Visit& visit, int64_t count, const float* gradient, const Sgd& sgd, uint32_t key,
                 const int64_t* numbers, int64_t first_number) {
    const int64_t dim = table.dim;
    std::vector<float> storage(3 * dim);
    std::vector<uint32_t> bit_storage(dim);
    float *w = storage.data(), *step = w + dim, *m = step + dim;
    uint32_t* bits = bit_storage.data();
    for (int64_t i = 0; i < count; i++) {
        const int64_t row = visit.row(i), offset = row * dim;
        const float* g = gradient + i * dim;
        const float rho = table.inverse_norm[row];
        read_row<weight_kind>(table.weight, offset, dim, 1.0f, w);
        float along = 0.0f;
#pragma omp simd reduction(+ : along)
        for (int64_t d = 0; d < dim; d++) along += g[d] * (w[d] * rho);
#pragma omp simd
        for (int64_t d = 0; d < dim; d++) step[d] = (g[d] - w[d] * rho * along) * rho * sgd.factor + sgd.decay * w[d];
        if constexpr (weight_kind != kFloat || state_kind == kBfloat16 || state_kind == kInt8) {
            const uint32_t seed = row_key(numbers[i] + first_number, key);
#pragma omp simd
            for (int64_t d = 0; d < dim; d++) bits[d] = mix(seed ^ (uint32_t(d) * 0x9E3779B9u));
        }
        if constexpr (state_kind != kNone) {
            float* scale = state_kind == kInt8 ? table.state_scale + row : nullptr;
            read_row<state_kind>(table.state, offset, dim, scale ? *scale : 1.0f, m);
#pragma omp simd
            for (int64_t d = 0; d < dim; d++) {
                m[d] = m[d] * sgd.momentum + step[d];
                step[d] = sgd.nesterov ? step[d] + sgd.momentum * m[d] : m[d];
            }
            write_row<state_kind>(table.state, offset, dim, bits, 16, scale, m);
        }
#pragma omp simd
        for (int64_t d = 0; d < dim; d++) w[d] -= sgd.rate * step[d];
        write_row<weight_kind>(table.weight, offset, dim, bits, 0, nullptr, w);
        read_row<weight_kind>(table.weight, offset, dim, 1.0f, w);
        double square = 0.0;  // see renew_norms, which must find the same
#pragma omp simd reduction(+ : square)
        for (int64_t d = 0; d < dim; d++) square += double(w[d]) * double(w[d]);
        const float norm = float(std::sqrt(square));
        table.inverse_norm[row] = 1.0f / (norm < kSmallestNorm ? kSmallestNorm : norm);
    }
}

template <Kind weight_kind>
auto update_for(int state_kind) {
    switch (state_kind) {
        case kFloat: return update_rows<weight_kind, kFloat>;
        case kBfloat16: return update_rows<weight_kind, kBfloat16>;
        case kInt8: return update_rows<weight_kind, kInt8>;
        default: return update_rows<weight_kind, kNone>;
    }
}

}  // namespace

extern "C" {

// 1 if the processor multiplies bf16 tiles and the system lets this process use them.
int plsc_has_tiles() { return tiles_are_allowed(); }

#ifdef PLSC_TILES

// Lay x (batch, dim) out as the right factor of W·xᵀ (`columns`) and of P·x (`pairs`); each has batch·dim elements.
void plsc_pack(const bf16* x, int64_t batch, int64_t dim, bf16* columns, bf16* pairs) {
    pack_column_pairs(x, batch, dim, columns);
    pack_row_pairs(x, batch, dim, pairs);
}

// total (batch) += Σ exp(s·cos) over the visited classes but each sample's target; pull (batch, dim), where not null,
// += Σ exp(s·cos)·ρ·W. position (batch): the target's index among the selected classes, counted from this call's first.
void plsc_first_pass(const bf16* table, const float* inverse, const int64_t* index, int64_t first, int64_t count,
                     const bf16* columns, int64_t batch, int64_t dim, float s, const int64_t* position, double* total,
                     float* pull) {
    configure_tiles();
    const Visit visit{index, first};
    BlockRows block;
    std::vector<float> z(kBlock * kPanel);
    std::vector<bf16> weighted(kPanel * kBlock), pairs(pull ? kBlock * dim : 0);
    for (int64_t start = 0; start < count; start += kBlock) {
        const int64_t here = std::min(kBlock, count - start);
        const bf16* rows = block.load(table, inverse, visit, start, here, dim);
        const float* rho = block.inverse_norm.data();
        if (pull) pack_row_pairs(rows, kBlock, dim, pairs.data());
        for (int64_t low = 0; low < batch; low += kPanel) {
            const int64_t width = std::min(kPanel, batch - low);
            multiply_panel(rows, columns + low * dim, dim, width, z.data());
            for (int64_t b = 0; b < width; b++) {
                const int64_t target = position[low + b] - start;
                if (target >= 0 && target < here) z[target * kPanel + b] = -INFINITY;
            }
            float sum[kPanel] = {};
            for (int64_t c = 0; c < here; c++) {
                float* row = z.data() + c * kPanel;
                const float factor = s * rho[c];
#pragma omp simd
                for (int64_t b = 0; b < width; b++) {
                    row[b] = exponential(row[b] * factor);
                    sum[b] += row[b];
                }
            }
            for (int64_t b = 0; b < width; b++) total[low + b] += sum[b];
            if (!pull) continue;
            for (int64_t c = 0; c < kBlock; c += 16)
                for (int64_t b = 0; b < width; b += 16)
                    store_transposed(z.data() + c * kPanel + b, kPanel, rho + c, weighted.data() + b * kBlock + c, kBlock);
            for (int64_t d = 0; d < dim; d += 32)
                for (int64_t b = 0; b < width; b += 32)
                    multiply_32x32<true>(weighted.data() + b * kBlock, kBlock, pairs.data() + (d / 16) * 512,
                                         (dim / 16) * 512, 512, kBlock / 32, pull + (low + b) * dim + d, dim);
        }
    }
    _tile_release();
}

// gradient (count rounded up to 256, dim): Σ_b P x over the batch for each visited row, where P = scale·exp(s·cos − log_z)
// and target_pull for a sample's own class.
void plsc_gradient(const bf16* table, const float* inverse, const int64_t* index, int64_t first, int64_t count,
                   const bf16* columns, const bf16* pairs, int64_t batch, int64_t dim, float s, const int64_t* position,
                   const float* log_z, const float* scale, const float* target_pull, float* gradient) {
    configure_tiles();
    const Visit visit{index, first};
    BlockRows block;
    std::vector<float> z(kBlock * kPanel);
    std::vector<bf16> probability(kBlock * batch);
    for (int64_t start = 0; start < count; start += kBlock) {
        const int64_t here = std::min(kBlock, count - start);
        const bf16* rows = block.load(table, inverse, visit, start, here, dim);
        for (int64_t low = 0; low < batch; low += kPanel) {
            const int64_t width = std::min(kPanel, batch - low);
            multiply_panel(rows, columns + low * dim, dim, width, z.data());
            for (int64_t c = 0; c < kBlock; c++) {
                float* row = z.data() + c * kPanel;
                const float factor = s * block.inverse_norm[c];
#pragma omp simd
                for (int64_t b = 0; b < width; b++) row[b] = exponential(row[b] * factor - log_z[low + b]) * scale[low + b];
            }
            for (int64_t b = 0; b < width; b++) {
                const int64_t target = position[low + b] - start;
                if (target >= 0 && target < here) z[target * kPanel + b] = target_pull[low + b];
            }
            for (int64_t c = 0; c < kBlock; c++)
                for (int64_t b = 0; b < width; b += 32) {
                    const float* row = z.data() + c * kPanel + b;
                    __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(row + 16), _mm512_loadu_ps(row));
                    _mm512_storeu_si512(probability.data() + c * batch + low + b, (__m512i)both);
                }
        }
        for (int64_t c = 0; c < kBlock; c += 32)
            for (int64_t d = 0; d < dim; d += 32)
                multiply_32x32<false>(probability.data() + c * batch, batch, pairs + (d / 16) * 512, (dim / 16) * 512, 512,
                                      batch / 32, gradient + (start + c) * dim + d, dim);
    }
    _tile_release();
}

#endif  // PLSC_TILES

// SGD on rows of the table, given the gradient (count, dim) by the unit rows: through the norm, decay, momentum,
// rounding, new norm. The kinds are those of `Kind`.
void plsc_sgd(void* weight, int weight_kind, float* inverse_norm, const int64_t* index, int64_t first, int64_t count,
              int64_t dim, const float* gradient, float factor, float rate, float momentum, float decay, int nesterov,
              void* state, int state_kind, float* state_scale, uint32_t key, const int64_t* numbers, int64_t first_number) {
    const auto update = weight_kind == kFloat ? update_for<kFloat>(state_kind) : update_for<kBfloat16>(state_kind);
    update({weight, inverse_norm, state, state_scale, dim}, {index, first}, count, gradient,
           {factor, rate, momentum, decay, nesterov}, key, numbers, first_number);
}

}  // extern "C"
