// The units of a processor that multiply and add in vector registers: float32 numbers, or pairs of bf16 numbers. The
// compiler's macros decide which of them exist, and how many lanes and registers they have.
#pragma once

#include <cstdint>
#include <cstring>

#include "tiles.h"

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#define PLSC_PAIRS 1
#include <immintrin.h>
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define PLSC_PAIRS 1
#include <arm_neon.h>
#endif

namespace {

// kRows x kAcross registers of sums fill the register file but for their factors: 24 of 32, or 12 of 16.
#if defined(__AVX512F__)
constexpr int kLanes = 16, kRows = 12, kAcross = 2;
#elif defined(__AVX__)
constexpr int kLanes = 8, kRows = 6, kAcross = 2;
#else
constexpr int kLanes = 4, kRows = 6, kAcross = 4;
#endif
constexpr int64_t kWide = kLanes * kAcross;  // columns of a product whose sums, for kRows rows, the registers hold

typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halves __attribute__((vector_size(kLanes * 2)));

// Float32 factors.
struct FloatUnit {
    using Number = float;
    using Factor = Floats;
    static constexpr int kTogether = 1;  // products that one instruction adds to a sum
#if defined(__AVX512F__)
    static constexpr const char* kName = "avx512";
#elif defined(__AVX2__) && defined(__FMA__)
    static constexpr const char* kName = "avx2";
#elif defined(__ARM_NEON)
    static constexpr const char* kName = "neon";
#else
    static constexpr const char* kName = "portable";  // no fused multiply-adds
#endif

    static Factor load(const float* from) {
        Floats result;
        std::memcpy(&result, from, sizeof result);
        return result;
    }
    static Factor load(const bf16* from) {
        Halves halves;
        std::memcpy(&halves, from, sizeof halves);
        const Words words = __builtin_convertvector(halves, Words) << 16;
        Floats result;
        std::memcpy(&result, &words, sizeof result);
        return result;
    }
    static Factor splat(const float* from) { return *from - Floats{}; }
    static Floats multiply_add(Floats sum, Factor a, Factor b) { return sum + a * b; }
};

#ifdef PLSC_PAIRS

// Pairs of bf16 factors, whose two products are added to one float32 sum.
struct PairUnit {
    using Number = bf16;
    using Factor = Words;
    static constexpr int kTogether = 2;

    static Factor load(const bf16* from) {
        Words result;
        std::memcpy(&result, from, sizeof result);
        return result;
    }
    static Factor splat(const bf16* from) {
        uint32_t pair;
        std::memcpy(&pair, from, 4);
        return pair - Words{};
    }
#ifdef __AVX512BF16__
    static constexpr const char* kName = "avx512-bf16";
    static Floats multiply_add(Floats sum, Factor a, Factor b) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }
#else
    static constexpr const char* kName = "neon-bf16";
    static Floats multiply_add(Floats sum, Factor a, Factor b) {
        return (Floats)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)a, (bfloat16x8_t)b);
    }
#endif
};

#endif  // PLSC_PAIRS

}  // namespace
