/* Sums of arrays and codecs: what the kernels of `arrays.gpu_programs` call. The prelude comes before, and BINS and
 * TOP_PIECE.
 *
 * Elements lie at multiples of their size; bytes of payloads anywhere. Where the addresses allow it 16 bytes are read or
 * written at once.
 */

/* Sums. Part after part, from first to last, is added in the work type, and the sum is narrowed once: `arrays.device`.
 * Integers are of unsigned types, whose sums wrap around; the bytes are those of signed ones.
 *
 * The parts are Few (their number is compiled in), Many (addresses in a table) or Mixed (16-bit floats, or float32 where
 * `wide` is not 0). part<N>(parts, p, i) gives N elements of part p from element i on, in the work type. */
template <typename P, int K> struct Few {
    typedef P type;
    const P *at[K];
};
template <typename P> struct Many {
    typedef P type;
    const u64 *table;
    i64 number;
    i64 stride; /* entries of the table from one part to the next */
    i64 begin;  /* elements of each part that come before those that are meant */
};
template <typename P> struct Mixed {
    typedef P type;
    const u64 *table;
    const u8 *wide;
    i64 number;
};

template <int N, typename P> HELPER Run<typename Work<P>::type, N> widened(const P *from)
{
    const Run<P, N> run = load<N>(from);
    Run<typename Work<P>::type, N> result;
    UNROLL for (int j = 0; j < N; ++j) result.at[j] = widen(run.at[j]);
    return result;
}
template <int N, typename P, int K>
HELPER Run<typename Work<P>::type, N> part(const Few<P, K> &parts, i64 p, i64 i)
{
    return widened<N>(parts.at[p] + i);
}
template <int N, typename P> HELPER Run<typename Work<P>::type, N> part(const Many<P> &parts, i64 p, i64 i)
{
    return widened<N>((const P *)parts.table[p * parts.stride] + parts.begin + i);
}
template <int N, typename P> HELPER Run<f32, N> part(const Mixed<P> &parts, i64 p, i64 i)
{
    return parts.wide[p] ? load<N>((const f32 *)parts.table[p] + i) : widened<N>((const P *)parts.table[p] + i);
}

template <typename P, int K> HELPER i64 number_of(const Few<P, K> &) { return K; }
template <typename P> HELPER i64 number_of(const Many<P> &parts) { return parts.number; }
template <typename P> HELPER i64 number_of(const Mixed<P> &parts) { return parts.number; }

template <typename P, int K> HELPER const void *address(const Few<P, K> &parts, i64 p, i64 i)
{
    return parts.at[p] + i;
}
template <typename P> HELPER const void *address(const Many<P> &parts, i64 p, i64 i)
{
    return (const P *)parts.table[p * parts.stride] + parts.begin + i;
}
template <typename P> HELPER const void *address(const Mixed<P> &parts, i64 p, i64 i)
{
    return parts.wide[p] ? (const void *)((const f32 *)parts.table[p] + i) : (const P *)parts.table[p] + i;
}

/* Where a sum goes: to an array, or to several (Outs), whose addresses are in a table. */
template <typename T> struct Outs {
    T *first;
    const u64 *others;
    i64 number; /* of the others */
    i64 stride; /* entries of the table from one to the next */
    i64 begin;  /* elements of each that come before those that are meant */
};
template <typename T> HELPER T *first_of(T *out) { return out; }
template <typename T> HELPER T *first_of(const Outs<T> &outs) { return outs.first; }
template <typename T> HELPER i64 others_of(T *) { return 0; }
template <typename T> HELPER i64 others_of(const Outs<T> &outs) { return outs.number; }
template <typename T> HELPER T *other_of(T *out, i64) { return out; }
template <typename T> HELPER T *other_of(const Outs<T> &outs, i64 o)
{
    return (T *)outs.others[o * outs.stride] + outs.begin;
}

/* N elements of the sum, from element i on. `to`: the first of `out`. */
template <int N, typename Parts, typename Out, typename T> HELPER void sum_at(const Parts &parts, const Out &out, T *to, i64 i)
{
    auto sum = part<N>(parts, 0, i);
    for (i64 p = 1; p < number_of(parts); ++p) {
        const auto next = part<N>(parts, p, i);
        UNROLL for (int j = 0; j < N; ++j) sum.at[j] = sum.at[j] + next.at[j];
    }
    Run<T, N> result;
    UNROLL for (int j = 0; j < N; ++j) result.at[j] = narrow<T>(sum.at[j]);
    store(to + i, result);
    for (i64 o = 0; o < others_of(out); ++o)
        store(other_of(out, o) + i, result);
}

/* The sum of n elements, by the threads of one block. An array of `out` may be one of the parts. */
template <typename Parts, typename Out, typename T> HELPER void sum_into(const Parts &parts, const Out &out, T *to, i64 n)
{
    typedef typename Parts::type P;
    /* A thread writes 16 bytes at once, and its neighbour the next 16: of 32 bytes of its own it would write each half
     * by an instruction of all threads, of which none fills a sector of the memory. */
    enum { N = 16 / sizeof(T), bytes = sizeof(P) * N < 16 ? sizeof(P) * N : 16 };
    /* `head` elements come before the first one that all can have so, if there is one. */
    const i64 head = least((i64)(-(u64)to & 15) / (i64)sizeof(T), n);
    bool fits = is_aligned(to + head);
    for (i64 p = 0; p < number_of(parts); ++p)
        fits = fits && ((u64)address(parts, p, head) & (bytes - 1)) == 0;
    for (i64 o = 0; o < others_of(out); ++o)
        fits = fits && is_aligned(other_of(out, o) + head);
    const i64 whole = fits ? (n - head) / N * N : 0;
    INSIDE (j, 0, whole / N)
        sum_at<N>(parts, out, to, head + j * N);
    INSIDE (i, 0, n - whole)
        sum_at<1>(parts, out, to, i < head ? i : i + whole);
}
template <typename Parts, typename Out> HELPER void sum_inside(const Parts &parts, const Out &out, i64 n)
{
    sum_into(parts, out, first_of(out), n);
}

/* Elements that a block sums up before it takes others: 8 KB of the finer type. It divides by all runs of 16 bytes. */
template <typename P, typename T> HELPER i64 piece(const P *, const T *)
{
    return 8192 / (sizeof(P) < sizeof(T) ? sizeof(P) : sizeof(T));
}

template <typename P, int K> HELPER Few<P, K> moved(const Few<P, K> &parts, i64 by)
{
    Few<P, K> result;
    UNROLL for (int p = 0; p < K; ++p) result.at[p] = parts.at[p] + by;
    return result;
}
template <typename P> HELPER Many<P> moved(Many<P> parts, i64 by)
{
    parts.begin += by;
    return parts;
}

template <typename Parts, typename T> HELPER void sum_all(const Parts &parts, T *out, i64 n)
{
    PIECES (begin, end, n, piece((const typename Parts::type *)0, out))
        sum_inside(moved(parts, begin), out + begin, end - begin);
}
template <typename P, typename T> HELPER void sum_all(const Mixed<P> &parts, T *out, i64 n)
{
    EACH (i, n)
        sum_at<1>(parts, out, out, i);
}

/* Lists of tensors (`tensor_of`). */
template <typename P, int K> HELPER Few<P, K> parts_of(const Few<P, K> *, const u64 *table, i64, i64 stride, i64 begin)
{
    Few<P, K> result;
    UNROLL for (int p = 0; p < K; ++p) result.at[p] = (const P *)table[p * stride] + begin;
    return result;
}
template <typename P>
HELPER Many<P> parts_of(const Many<P> *, const u64 *table, i64 number, i64 stride, i64 begin)
{
    Many<P> result = {table, number, stride, begin};
    return result;
}

/* Write the sum of each tensor of a list to each of its outs, of type T. table: the addresses of all tensors' first
 * parts, then of all second ones, and so on; then those of the outs likewise. */
template <typename T, typename Parts>
HELPER void sum_lists(const u64 *table, const i64 *offsets, i64 number, i64 outs, i64 tensors, i64 n)
{
    PIECES (begin, end, n, piece((const typename Parts::type *)0, (const T *)0)) {
        i64 at = begin;
        for (i64 t = tensor_of(offsets, tensors, begin); at < end; ++t) {
            const i64 stop = least(offsets[t + 1], end), first = at - offsets[t];
            if (at < stop) {
                const u64 *const into = table + number * tensors + t;
                const Outs<T> out = {(T *)*into + first, into + tensors, outs - 1, tensors, first};
                sum_inside(parts_of((const Parts *)0, table + t, number, tensors, first), out, stop - at);
                at = stop;
            }
        }
    }
}

/* out = array * factor, in the work type; `out` may be the array. */
template <int N, typename T>
HELPER void scale_at(const T *array, typename Work<T>::type factor, T *out, i64 i)
{
    const auto run = widened<N>(array + i);
    Run<T, N> result;
    UNROLL for (int j = 0; j < N; ++j) result.at[j] = narrow<T>(run.at[j] * factor);
    store(out + i, result);
}
template <typename T> HELPER void scale_all(const T *array, typename Work<T>::type factor, T *out, i64 n)
{
    enum { N = 16 / sizeof(T) };
    const i64 whole = is_aligned(array) && is_aligned(out) ? n / N : 0;
    EACH (j, whole)
        scale_at<N>(array, factor, out, j * N);
    EACH (i, n - whole * N)
        scale_at<1>(array, factor, out, i + whole * N);
}

/* Codecs: the bytes are those of `ops.quantize`. KEEPS: there is a residual, to which the values are added and in which
 * what is left out stays. ADDS: the elements are added to what is there. */

/* The bytes of the words that hold n elements, so many in each word. */
HELPER i64 bytes_of_words(i64 n, i64 factor) { return (n + factor - 1) / factor * 4; }

template <bool KEEPS> struct TwoBit {
    f32 quantum;
    enum { bits = 2 };
    HELPER u32 code(f32 x, f32 &rest) const
    {
        const f32 total = KEEPS ? x + rest : x;
        const bool plus = total >= quantum, minus = total <= -quantum;
        rest = total - (plus ? quantum : minus ? -quantum : 0.0f);
        return plus ? 3 : minus ? 2 : 0;
    }
};
template <bool KEEPS> struct OneBit {
    f32 threshold, step;
    bool is_inclusive;
    enum { bits = 1 };
    HELPER u32 code(f32 x, f32 &rest) const
    {
        const f32 total = KEEPS ? x + rest : x;
        const bool is_set = is_inclusive ? total >= threshold : total > threshold;
        rest = total - (is_set ? step : -step);
        return is_set;
    }
};

/* Each thread makes one byte, of 8 / bits elements. */
template <bool KEEPS, typename Codec>
HELPER void encode(const Codec &codec, const f32 *values, f32 *residual, u8 *out, i64 n)
{
    enum { bits = Codec::bits, N = 8 / bits };
    const bool fits = is_aligned(values) && (!KEEPS || is_aligned(residual));
    EACH (at, bytes_of_words(n, 4 * N)) {
        const i64 first = at * N;
        u32 packed = 0;
        f32 rest = 0;
        if (fits && first + N <= n) {
            const Run<f32, N> run = load<N>(values + first);
            Run<f32, N> rests = run;
            if (KEEPS)
                rests = load<N>(residual + first);
            UNROLL for (int j = 0; j < N; ++j) packed = packed << bits | codec.code(run.at[j], rests.at[j]);
            if (KEEPS)
                store(residual + first, rests);
        } else {
            for (i64 i = first; i < first + N; ++i) {
                packed <<= bits;
                if (i < n) {
                    rest = KEEPS ? residual[i] : 0.0f;
                    packed |= codec.code(values[i], rest);
                    if (KEEPS)
                        residual[i] = rest;
                }
            }
        }
        out[at] = (u8)packed;
    }
}

HELPER f32 two_bit_value(u32 code, f32 quantum) { return code == 3 ? quantum : code == 2 ? -quantum : 0.0f; }
HELPER f32 one_bit_value(u32 code, f32 step) { return code ? step : -step; }

/* Each thread makes 16 bytes, a whole payload byte or a half of it (`sum_into` says why). */
template <bool ADDS, int BITS> HELPER void decode(const u8 *payload, f32 size, f32 *out, i64 n)
{
    enum { N = 4, in_byte = 8 / BITS / N, mask = (1 << BITS) - 1 };
    const bool fits = is_aligned(out);
    EACH (at, (n + N - 1) / N) {
        const u32 packed = (u32)payload[at / in_byte] << at % in_byte * (N * BITS);
        const i64 first = at * N;
        Run<f32, N> run;
        UNROLL for (int j = 0; j < N; ++j)
        {
            const u32 code = packed >> (8 - BITS - BITS * j) & mask;
            run.at[j] = BITS == 2 ? two_bit_value(code, size) : one_bit_value(code, size);
        }
        if (fits && first + N <= n) {
            if (ADDS) {
                const Run<f32, N> present = load<N>(out + first);
                UNROLL for (int j = 0; j < N; ++j) run.at[j] = present.at[j] + run.at[j];
            }
            store(out + first, run);
        } else {
            UNROLL for (int j = 0; j < N; ++j)
                if (first + j < n)
                    out[first + j] = ADDS ? out[first + j] + run.at[j] : run.at[j];
        }
    }
}

/* out += halves */
template <int N> HELPER void half_add_at(const f16 *halves, f32 *out, i64 i)
{
    const Run<f32, N> given = widened<N>(halves + i);
    Run<f32, N> sum = load<N>(out + i);
    UNROLL for (int j = 0; j < N; ++j) sum.at[j] = sum.at[j] + given.at[j];
    store(out + i, sum);
}
HELPER void half_add(const f16 *halves, f32 *out, i64 n)
{
    const i64 whole = is_aligned(halves) && is_aligned(out) ? n / 8 : 0;
    EACH (j, whole)
        half_add_at<8>(halves, out, j * 8);
    EACH (i, n - whole * 8)
        half_add_at<1>(halves, out, i + whole * 8);
}

/* Write 1 into `wrong` if a value, or its sum with the residual, is not finite; else leave it alone. */
template <bool KEEPS, int N> HELPER bool are_finite(const f32 *values, const f32 *residual, i64 i)
{
    bool result = true;
    Run<f32, N> run = load<N>(values + i);
    if (KEEPS) {
        const Run<f32, N> rests = load<N>(residual + i);
        UNROLL for (int j = 0; j < N; ++j) run.at[j] = run.at[j] + rests.at[j];
    }
    UNROLL for (int j = 0; j < N; ++j) result &= is_finite(run.at[j]);
    return result;
}
template <bool KEEPS> HELPER void find_not_finite(const f32 *values, const f32 *residual, u32 *wrong, i64 n)
{
    const i64 whole = is_aligned(values) && (!KEEPS || is_aligned(residual)) ? n / 4 : 0;
    EACH (j, whole)
        if (!are_finite<KEEPS, 4>(values, residual, j * 4))
            *wrong = 1;
    EACH (i, n - whole * 4)
        if (!are_finite<KEEPS, 1>(values, residual, i + whole * 4))
            *wrong = 1;
}

/* The sums of magnitudes, in float64: sum s is that of elements s, s + number, s + 2 number and so on. */
template <bool KEEPS>
HELPER void add_magnitudes(const f32 *values, const f32 *residual, f64 *sums, i64 number, i64 n)
{
    EACH (s, number) {
        f64 sum = 0;
        for (i64 i = s; i < n; i += number)
            sum += (f64)magnitude(KEEPS ? values[i] + residual[i] : values[i]);
        sums[s] = sum;
    }
}

/* The elements of largest magnitude. Of numbers, the bits without the sign are in the order of the magnitudes. */
HELPER u32 size_of(f32 x) { return bits_of(x) & 0x7fffffffu; }

/* Add to `counts` how many sizes have each value of `width` bits, which come above the lowest `shift` bits; of those whose
 * bits above these are `prefix`. */
template <int N>
HELPER void count_sizes_at(const f32 *values, u32 prefix, u32 shift, u32 width, u32 *bins, i64 i)
{
    const Run<f32, N> run = load<N>(values + i);
    UNROLL for (int j = 0; j < N; ++j)
    {
        const u32 size = size_of(run.at[j]) >> shift;
        if (size >> width == prefix)
            add_to(bins + (size & ((1u << width) - 1)), 1u);
    }
}
HELPER void count_all_sizes(const f32 *values, u32 prefix, u32 shift, u32 width, u64 *counts, i64 n)
{
    SHARED u32 bins[BINS];
    INSIDE (b, 0, BINS)
        bins[b] = 0;
    MEET;
    const bool fits = is_aligned(values);
    PIECES (begin, end, n, 8192) {
        const i64 whole = fits ? (end - begin) / 4 : 0;
        INSIDE (j, 0, whole)
            count_sizes_at<4>(values, prefix, shift, width, bins, begin + j * 4);
        INSIDE (i, begin + whole * 4, end)
            count_sizes_at<1>(values, prefix, shift, width, bins, i);
    }
    MEET;
    INSIDE (b, 0, BINS)
        if (bins[b])
            add_to(counts + b, (u64)bins[b]);
}

/* A piece is the elements that a block looks at together, and a stretch those that a thread looks at: their order stays.
 * Two numbers in one word: how many sizes are above `bound`, times 65536, and how many equal it. */
enum { STRETCH = 16, STRETCHES = TOP_PIECE / STRETCH };
HELPER u32 compared(f32 x, u32 bound) { return size_of(x) > bound ? 1u << 16 : size_of(x) == bound; }
HELPER u32 found_in(const f32 *values, u32 bound, i64 first, i64 end)
{
    u32 found = 0;
    if (is_aligned(values) && first + STRETCH <= end) {
        const Run<f32, STRETCH> run = load<STRETCH>(values + first);
        UNROLL for (int j = 0; j < STRETCH; ++j) found += compared(run.at[j], bound);
    } else {
        for (i64 i = first; i < first + STRETCH && i < end; ++i)
            found += compared(values[i], bound);
    }
    return found;
}

/* Write for each piece what is found in it. */
HELPER void find_all_top(const f32 *values, u32 bound, u32 *found, i64 n)
{
    SHARED u32 sum[1];
    PIECES (begin, end, n, TOP_PIECE) {
        INSIDE (s, 0, 1)
            sum[s] = 0;
        MEET;
        INSIDE (s, 0, STRETCHES)
            add_to(sum, found_in(values, bound, begin + s * STRETCH, end));
        MEET;
        INSIDE (s, 0, 1)
            found[begin / TOP_PIECE] = sum[s];
    }
}

/* Write places and values of the elements whose size is above `bound`, and of the first of those that equal it, in their
 * order, and leave 0 there. Of piece p: to the places from shares[2 p] on, of those that equal it shares[2 p + 1]. */
HELPER void take_all_top(f32 *values, u32 bound, const i64 *shares, u32 *places, f32 *taken, i64 n)
{
    SHARED u32 sums[2][STRETCHES];
    PIECES (begin, end, n, TOP_PIECE) {
        const i64 start = shares[begin / TOP_PIECE * 2];
        const u32 quota = (u32)shares[begin / TOP_PIECE * 2 + 1];
        INSIDE (s, 0, STRETCHES)
            sums[0][s] = found_in(values, bound, begin + s * STRETCH, end);
        MEET;
        u32 now = 0;
        for (u32 step = 1; step < STRETCHES; step *= 2, now ^= 1) {
            INSIDE (s, 0, STRETCHES)
                sums[now ^ 1][s] = sums[now][s] + (s >= step ? sums[now][s - step] : 0);
            MEET;
        }
        INSIDE (s, 0, STRETCHES) {
            const u32 before = s ? sums[now][s - 1] : 0;
            u32 equal = before & 0xffffu;
            equal = equal < quota ? equal : quota;
            i64 at = start + (before >> 16) + equal;
            const i64 first = begin + s * STRETCH;
            for (i64 i = first; i < least(first + STRETCH, end); ++i) {
                const f32 x = values[i];
                const u32 found = compared(x, bound);
                if (found > 1 || (found == 1 && equal < quota)) {
                    equal += found & 1;
                    places[at] = (u32)i;
                    taken[at] = x;
                    ++at;
                    values[i] = 0;
                }
            }
        }
        MEET;
    }
}
