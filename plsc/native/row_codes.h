// Rows of float32 as 8-bit codes, with bounds of what they leave: one pass of plsc/index/codes.py's encode_rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

extern "C" {

// codes (count, stride) uint8 of rows (count, dim), and bounds in three arrays (count): steps, residues, lengths. The
// constants are those of codes.py. Returns the first row that is not finite, or -1.
int64_t plsc_encode_rows(const float* rows, int64_t count, int64_t dim, int64_t stride, float slack, float coding,
                         float underflow, float least_step, uint8_t* codes, float* steps, float* residues,
                         float* lengths) {
    for (int64_t r = 0; r < count; r++, rows += dim, codes += stride) {
        float largest = 0, square = 0;
#pragma omp simd reduction(max : largest) reduction(+ : square)
        for (int64_t d = 0; d < dim; d++) {
            largest = std::max(largest, std::fabs(rows[d]));
            square += rows[d] * rows[d];
        }
        const float length = std::sqrt(square), whole = largest / 127;
        if (!(length <= 3e38f)) return r;
        const float step = whole < least_step ? 0 : whole, inverse = step > 0 ? 1 / step : 0;
        float left = 0;
#pragma omp simd reduction(+ : left)
        for (int64_t d = 0; d < dim; d++) {
            const float code = std::min(std::max(std::nearbyint(rows[d] * inverse), -127.0f), 127.0f);
            const float rest = rows[d] - code * step;
            left += rest * rest;
            codes[d] = uint8_t(int32_t(code) + 128);
        }
        steps[r] = step;
        residues[r] = slack * std::sqrt(left) + slack * coding * length + underflow;
        lengths[r] = slack * length + residues[r];
    }
    return -1;
}

}  // extern "C"
