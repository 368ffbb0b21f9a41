/* First-fit-decreasing bin packing in O(n log n): a radix sort, then a tree of the bins' room that leads to the first bin with enough. */
#include "first_fit.h"

#include <string.h>

const char first_fit_doc[] =
    "first_fit(sizes, capacity, items, offsets)\n--\n\n"
    "Put n items of sizes[i] (int64[n], each from 1 to capacity) into bins: the largest first, among equals the one of the higher index,\n"
    "each into the first bin that has room. Bin b gets items[offsets[b] : offsets[b + 1]] in the order they came (int64[n], int64[n + 1], of\n"
    "which the number of bins and one are written). Returns the number of bins. Raises TypeError or ValueError before anything is written.";

#define DIGIT_BITS 11
#define DIGITS ((size_t)1 << DIGIT_BITS)

/* Scratch memory for n items and `leaves` bins. */
typedef struct {
    size_t *order, *sorted; /* n each; the order is in either of them */
    size_t *bins;           /* n: the bin of each item in order */
    int64_t *room;          /* 2 * leaves: a tree over bins, room[i] = max(room[2 * i], room[2 * i + 1]); the bins begin at `leaves` */
    size_t leaves;
} Scratch;

/* The item numbers by (size, number), both descending: a stable sort by `largest - size`, begun with the last item. */
static size_t *largest_first(const int64_t *sizes, size_t count, Scratch *scratch) {
    size_t *from = scratch->order, *to = scratch->sorted, ends[DIGITS];
    int64_t largest = 1, smallest = INT64_MAX;
    for (size_t i = 0; i < count; i++) {
        if (sizes[i] > largest) largest = sizes[i];
        if (sizes[i] < smallest) smallest = sizes[i];
        from[i] = count - 1 - i;
    }
    for (int shift = 0; count > 0 && shift < 63 && (largest - smallest) >> shift > 0; shift += DIGIT_BITS) {
        memset(ends, 0, sizeof ends);
        for (size_t i = 0; i < count; i++) ends[(size_t)((largest - sizes[i]) >> shift) % DIGITS]++;
        size_t before = 0;
        for (size_t digit = 0; digit < DIGITS; digit++) {
            size_t here = ends[digit];
            ends[digit] = before;
            before += here;
        }
        for (size_t i = 0; i < count; i++) to[ends[(size_t)((largest - sizes[from[i]]) >> shift) % DIGITS]++] = from[i];
        size_t *swapped = from;
        from = to;
        to = swapped;
    }
    return from;
}

/* The bin of each item in order; returns how many bins there are. A bin that is not open yet is one with all its room. */
static size_t place_items(const int64_t *sizes, const size_t *order, size_t count, int64_t capacity, const Scratch *scratch) {
    int64_t *room = scratch->room;
    size_t leaves = scratch->leaves, open = 0;
    for (size_t node = 0; node < 2 * leaves; node++) room[node] = capacity;
    for (size_t i = 0; i < count;) {
        int64_t size = sizes[order[i]];
        size_t same = 1, node = 1;
        while (i + same < count && sizes[order[i + same]] == size) same++;
        for (size_t taken; same > 0; same -= taken, i += taken, node = 1) {
            while (node < leaves) node = 2 * node + (room[2 * node] < size);
            taken = same == 1 ? 1 : (size_t)(room[node] / size);
            if (taken > same) taken = same;
            for (size_t k = 0; k < taken; k++) scratch->bins[i + k] = node - leaves;
            if (node - leaves >= open) open = node - leaves + 1;
            room[node] -= (int64_t)taken * size;
            for (; node > 1; node /= 2) {
                int64_t larger = room[node] > room[node ^ 1] ? room[node] : room[node ^ 1];
                if (room[node / 2] == larger) break;
                room[node / 2] = larger;
            }
        }
    }
    return open;
}

static void write_bins(const size_t *order, size_t count, size_t open, const Scratch *scratch, int64_t *items, int64_t *offsets) {
    for (size_t bin = 0; bin <= open; bin++) offsets[bin] = 0;
    for (size_t i = 0; i < count; i++) offsets[scratch->bins[i] + 1]++;
    for (size_t bin = 0; bin < open; bin++) offsets[bin + 1] += offsets[bin];
    for (size_t i = 0; i < count; i++) items[offsets[scratch->bins[i]]++] = (int64_t)order[i];
    for (size_t bin = open; bin > 0; bin--) offsets[bin] = offsets[bin - 1]; /* each had moved on to where the next one begins */
    offsets[0] = 0;
}

/* Of any two bins of first fit the later one's first item had no room in the earlier, so both together hold more than one capacity: there
   are at most 2 * total / capacity + 1 of them. Returns a power of two that is at least that, or SIZE_MAX where a size is out of range. */
static size_t leaves_for(const int64_t *sizes, size_t count, int64_t capacity) {
    double total = 0;
    for (size_t i = 0; i < count; i++) {
        if (sizes[i] < 1 || sizes[i] > capacity) {
            PyErr_Format(PyExc_ValueError, "item %zu has size %lld, bins have %lld", i, (long long)sizes[i], (long long)capacity);
            return SIZE_MAX;
        }
        total += (double)sizes[i];
    }
    double most = 2 * total / (double)capacity * (1 + 1e-6) + 2; /* the sum is rounded, by far less than this allows for */
    size_t leaves = 1;
    while (leaves < count && (double)leaves < most) leaves *= 2;
    return leaves;
}

static int outputs_fit(const Array *items, const Array *offsets, size_t count) {
    if (items->count != count || offsets->count != count + 1) {
        PyErr_Format(PyExc_ValueError, "items and offsets have %zu and %zu entries, not %zu and %zu", items->count, offsets->count, count,
                     count + 1);
        return 0;
    }
    if (arrays_overlap(items, offsets)) {
        PyErr_SetString(PyExc_ValueError, "the outputs share memory");
        return 0;
    }
    return 1;
}

PyObject *first_fit(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *given, *item_memory, *offset_memory, *result = NULL;
    long long capacity;
    Array items = {0}, offsets = {0};
    Scratch scratch = {0};
    size_t count = SIZE_MAX, open = 0;
    if (!PyArg_ParseTuple(arguments, "OLOO:first_fit", &given, &capacity, &item_memory, &offset_memory)) return NULL;
    int64_t *sizes = indices_copied(given, &count, "sizes");
    if (sizes == NULL) return NULL;
    if (!array_open_as(&items, item_memory, 1, INT64, "items")) goto done;
    if (!array_open_as(&offsets, offset_memory, 1, INT64, "offsets")) goto done;
    if (!outputs_fit(&items, &offsets, count)) goto done;
    if ((scratch.leaves = leaves_for(sizes, count, capacity)) == SIZE_MAX) goto done;
    scratch.order = PyMem_Calloc(3 * count + 1, sizeof *scratch.order);
    scratch.room = PyMem_Calloc(2 * scratch.leaves, sizeof *scratch.room);
    if (scratch.order == NULL || scratch.room == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    scratch.sorted = scratch.order + count;
    scratch.bins = scratch.sorted + count;
    Py_BEGIN_ALLOW_THREADS
    const size_t *order = largest_first(sizes, count, &scratch);
    open = place_items(sizes, order, count, capacity, &scratch);
    write_bins(order, count, open, &scratch, (int64_t *)items.data, (int64_t *)offsets.data);
    Py_END_ALLOW_THREADS
    result = PyLong_FromSize_t(open);
done:
    PyMem_Free(scratch.order);
    PyMem_Free(scratch.room);
    PyMem_Free(sizes);
    array_close(&items);
    array_close(&offsets);
    return result;
}
