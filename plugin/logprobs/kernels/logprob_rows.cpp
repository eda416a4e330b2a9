// The two passes over [rows, columns] logits: row statistics forward, gradient of the logits backward.
//
// Plain C interface, no dependency: built with one compiler call by cpu_extension.py. Vectors are those of the
// compiler (GCC, Clang), so that the same text serves AVX2, AVX-512 and NEON. Do not build with -ffast-math: NaN and
// infinity are part of the contract (see row_statistics.py).

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <sys/mman.h>

namespace {

// The width of a register: compilers split wider vectors badly.
#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX2__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
constexpr int64_t kStep = 2 * kLanes;  // columns per iteration: two registers
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

constexpr int64_t kChunk = 2048;  // columns between two updates of the maximum; 8 KiB of float32
constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
constexpr double kLog2E = 1.4426950408889634;
constexpr double kLn2 = 0.6931471805599453;

struct bfloat16 {
  uint16_t bits;
};

inline Floats spread(float value) { return Floats{} + value; }

template <typename Vector>
inline Vector read(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

// kStep columns as float32. Their order inside the pair is that of the overload: consecutive for float32, even
// and odd columns for bfloat16, whose two halves of a 32-bit word need a shift or a mask and no shuffle.
struct Pair {
  Floats first, second;
};

inline Pair load_pair(const float* from) { return {read<Floats>(from), read<Floats>(from + kLanes)}; }
inline Pair load_pair(const bfloat16* from) {
  const Words words = read<Words>(from);
  return {__builtin_bit_cast(Floats, words << 16), __builtin_bit_cast(Floats, words & 0xffff0000u)};
}

inline void store_pair(float* to, Pair values) { std::memcpy(to, &values, sizeof values); }
inline void store_pair(bfloat16* to, Pair values) {
  // To nearest, ties to even. A NaN of bfloat16 logits, or one that the processor made, survives the addition.
  const auto rounded = [](Floats lanes) {
    const Words bits = __builtin_bit_cast(Words, lanes);
    return bits + 0x7fffu + ((bits >> 16) & 1u);
  };
  const Words words = (rounded(values.first) >> 16) | (rounded(values.second) & 0xffff0000u);
  std::memcpy(to, &words, sizeof words);
}

inline void set_to_negative_infinity(float* value) { *value = kNegativeInfinity; }
inline void set_to_negative_infinity(bfloat16* value) { value->bits = 0xff80; }

template <typename Logit>
struct Row {
  const Logit* logits;

  Pair pair(int64_t column) const { return load_pair(logits + column); }

  // The last `count` < kStep columns, filled up with -inf.
  Pair tail(int64_t column, int64_t count) const {
    Logit padded[kStep];
    for (int64_t j = 0; j < kStep; ++j) {
      if (j < count) padded[j] = logits[column + j];
      else set_to_negative_infinity(padded + j);
    }
    return load_pair(padded);
  }

  // The hardware does not foresee the next chunk while a chunk is read for the second time.
  void prefetch(int64_t column) const { __builtin_prefetch(logits + column); }
};

// 2^x for -126 <= x <= 0 and for NaN, to about one unit in the last place. `kZeroBelow` makes the result 0 at
// and below -126; otherwise it stays at 2^-126 there, which is nothing beside a sum of at least 1.
inline Floats clamp_exponent(Floats x) { return x < -126.0f ? spread(-126.0f) : x; }
template <bool kZeroBelow>
inline Floats power_of_two(Floats clamped) {
  const float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
  const Floats shifted = clamped + kRound;
  const Floats r = clamped - (shifted - kRound);
  Floats p = spread(1.5353360627e-04f);
  p = p * r + 1.3398874867e-03f;
  p = p * r + 9.6184373664e-03f;
  p = p * r + 5.5503324697e-02f;
  p = p * r + 2.4022647913e-01f;
  p = p * r + 6.9314720286e-01f;
  p = p * r + 1.0f;
  const Ints exponent = (__builtin_bit_cast(Ints, shifted) << 23) + 0x3f800000;
  p *= __builtin_bit_cast(Floats, exponent);
  if constexpr (kZeroBelow) p = clamped <= -126.0f ? spread(0.0f) : p;
  return p;
}

// Sums relative to the largest logit seen so far, kept in units of log 2.
struct RowSums {
  float maximum = kNegativeInfinity;
  double sum_exp = 0.0;
  double weighted_sum = 0.0;

  void raise_maximum(float candidate, double log2_scale) {
    if (!(candidate > maximum)) return;
    if (maximum != kNegativeInfinity) {
      const double shift = (static_cast<double>(maximum) - candidate) * log2_scale;
      const double factor = std::exp2(shift);
      weighted_sum = factor * (weighted_sum + shift * sum_exp);
      sum_exp *= factor;
    }
    maximum = candidate;
  }
};

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }  // b where a is NaN

inline float largest_lane(Floats values) {
  float largest = kNegativeInfinity;
  for (int64_t j = 0; j < kLanes; ++j) largest = values[j] > largest ? values[j] : largest;
  return largest;
}

inline double sum_of_lanes(Floats values) {
  double total = 0.0;
  for (int64_t j = 0; j < kLanes; ++j) total += values[j];
  return total;
}

template <bool kEntropy>
struct LaneSums {
  float shift, log2_scale;
  Floats sum{}, weighted{};

  void add(Floats values) {
    const Floats exponent = clamp_exponent((values - shift) * log2_scale);
    const Floats weight = power_of_two<false>(exponent);
    sum += weight;
    if constexpr (kEntropy) weighted += weight * exponent;
  }
};

// A chunk is read twice, the second time from the first-level cache: for its maximum, then for its sums.
template <bool kEntropy, typename Logit>
RowSums row_sums(Row<Logit> row, int64_t columns, double log2_scale) {
  RowSums sums;
  for (int64_t begin = 0; begin < columns; begin += kChunk) {
    const int64_t end = columns - begin < kChunk ? columns : begin + kChunk;
    const int64_t full = begin + (end - begin) / kStep * kStep;
    const Pair rest = row.tail(full, end - full);
    Pair largest = rest;
    for (int64_t j = begin; j < full; j += kStep) {
      const Pair values = row.pair(j);
      largest = {larger(values.first, largest.first), larger(values.second, largest.second)};
    }
    sums.raise_maximum(largest_lane(larger(largest.first, largest.second)), log2_scale);
    const float shift = sums.maximum == kNegativeInfinity ? 0.0f : sums.maximum;
    LaneSums<kEntropy> even{shift, static_cast<float>(log2_scale)}, odd = even;
    for (int64_t j = begin; j < full; j += kStep) {
      row.prefetch(j + kChunk);
      const Pair values = row.pair(j);
      even.add(values.first);
      odd.add(values.second);
    }
    if (full < end) {
      even.add(rest.first);
      odd.add(rest.second);
    }
    sums.sum_exp += sum_of_lanes(even.sum + odd.sum);
    if constexpr (kEntropy) sums.weighted_sum += sum_of_lanes(even.weighted + odd.weighted);
  }
  return sums;
}

// With e = exp((logit - maximum) * scale) = sum_exp * p and x its base-2 exponent, the gradient away from the
// target, -scale * p * (grad_log_prob + grad_entropy * (log p + entropy)), is e * (constant + slope * x).
struct GradientLine {
  float maximum, log2_scale, constant, slope;

  static GradientLine of(float maximum, double sum_exp, float entropy, double on_target, double on_entropy,
                         float scale) {
    const double offset = on_entropy == 0.0 ? 0.0 : on_entropy * (entropy - std::log(sum_exp));
    return {maximum, static_cast<float>(scale * kLog2E), static_cast<float>(-(on_target + offset) / sum_exp),
            static_cast<float>(-on_entropy * kLn2 / sum_exp)};
  }

  Floats at(Floats values) const {
    const Floats exponent = clamp_exponent((values - maximum) * log2_scale);
    return power_of_two<true>(exponent) * (exponent * slope + constant);
  }
  Pair at(Pair values) const { return {at(values.first), at(values.second)}; }
};

template <typename Logit>
void row_gradient(Row<Logit> row, int64_t columns, GradientLine line, Logit* out) {
  const int64_t full = columns / kStep * kStep;
  for (int64_t j = 0; j < full; j += kStep) {
    row.prefetch(j + 64 * kStep);
    store_pair(out + j, line.at(row.pair(j)));
  }
  if (full == columns) return;
  Logit last[kStep];
  store_pair(last, line.at(row.tail(full, columns - full)));
  std::memcpy(static_cast<void*>(out + full), last, (columns - full) * sizeof(Logit));
}

struct Matrix {
  void* logits;
  int64_t rows, columns, row_stride;
  const int64_t* targets;

  int64_t rows_per_task() const { return columns >= 32768 ? 1 : 32768 / columns; }
};

template <typename Logit>
void forward(Matrix m, float scale, bool with_entropy, float* maximum, float* sum_exp, float* weighted_sum,
             float* target_logit, int threads) {
  const double log2_scale = scale * kLog2E;
#pragma omp parallel for schedule(dynamic, m.rows_per_task()) num_threads(threads)
  for (int64_t i = 0; i < m.rows; ++i) {
    const Logit* logits = static_cast<const Logit*>(m.logits) + i * m.row_stride;
    const Row<Logit> row{logits};
    RowSums sums = with_entropy ? row_sums<true>(row, m.columns, log2_scale)
                                : row_sums<false>(row, m.columns, log2_scale);
    // Nothing above -inf: sums of exactly 0, as in the other kernels, unless they hold a NaN.
    if (sums.maximum == kNegativeInfinity && !std::isnan(sums.sum_exp)) sums = RowSums{};
    maximum[i] = sums.maximum;
    sum_exp[i] = static_cast<float>(sums.sum_exp);
    if (with_entropy) weighted_sum[i] = static_cast<float>(sums.weighted_sum * kLn2);
    target_logit[i] = m.targets[i] < 0 ? 0.0f : row.tail(m.targets[i], 1).first[0];
  }
}

template <typename Logit>
void backward(Matrix m, const float* maximum, const float* sum_exp, const float* entropy,
              const float* grad_log_probs, const float* grad_entropy, float scale, Logit* out,
              int64_t out_stride, int threads) {
#pragma omp parallel for schedule(dynamic, m.rows_per_task()) num_threads(threads)
  for (int64_t i = 0; i < m.rows; ++i) {
    const Logit* logits = static_cast<const Logit*>(m.logits) + i * m.row_stride;
    Logit* out_row = out + i * out_stride;
    const double on_target = grad_log_probs == nullptr ? 0.0 : static_cast<double>(grad_log_probs[i]) * scale;
    const double on_entropy =
        grad_entropy == nullptr || entropy == nullptr ? 0.0 : static_cast<double>(grad_entropy[i]) * scale;
    if (on_target == 0.0 && on_entropy == 0.0) {
      std::memset(static_cast<void*>(out_row), 0, m.columns * sizeof(Logit));
      continue;
    }
    const GradientLine line = GradientLine::of(maximum[i], sum_exp[i], on_entropy == 0.0 ? 0.0f : entropy[i],
                                               on_target, on_entropy, scale);
    // Computed before the row is overwritten, and rounded to the logits' type only once.
    const int64_t target = m.targets[i];
    const Row<Logit> row{logits};
    Logit at_target[kStep];
    if (target >= 0) {
      const Floats away = line.at(row.tail(target, 1).first);
      store_pair(at_target, {away + static_cast<float>(on_target), away});
    }
    row_gradient(row, m.columns, line, out_row);
    if (target >= 0) out_row[target] = at_target[0];
  }
}

}  // namespace

extern "C" {

// In both functions element_size 4 is float32 and 2 is bfloat16, strides are in elements.
void megatron_tis_forward(void* logits, int element_size, int64_t rows, int64_t columns, int64_t row_stride,
                          const int64_t* targets, float scale, int with_entropy, float* maximum, float* sum_exp,
                          float* weighted_sum, float* target_logit, int threads) {
  const Matrix m{logits, rows, columns, row_stride, targets};
  const auto pass = element_size == 4 ? forward<float> : forward<bfloat16>;
  pass(m, scale, with_entropy != 0, maximum, sum_exp, weighted_sum, target_logit, threads);
}

// `out` may be `logits`; entropy, grad_log_probs and grad_entropy may be null.
void megatron_tis_backward(void* logits, int element_size, int64_t rows, int64_t columns, int64_t row_stride,
                           const int64_t* targets, const float* maximum, const float* sum_exp, const float* entropy,
                           const float* grad_log_probs, const float* grad_entropy, float scale, void* out,
                           int64_t out_stride, int threads) {
  const Matrix m{logits, rows, columns, row_stride, targets};
  if (element_size == 4) {
    backward(m, maximum, sum_exp, entropy, grad_log_probs, grad_entropy, scale, static_cast<float*>(out), out_stride,
             threads);
  } else {
    backward(m, maximum, sum_exp, entropy, grad_log_probs, grad_entropy, scale, static_cast<bfloat16*>(out),
             out_stride, threads);
  }
}

// Asks for large pages where a fresh result will be written: faulting in 4 KiB pages costs more than the pass.
void megatron_tis_prefer_large_pages(void* start, int64_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = 4096;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(start) + kPage - 1) / kPage * kPage;
  const uintptr_t last = (reinterpret_cast<uintptr_t>(start) + bytes) / kPage * kPage;
  if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}
}
