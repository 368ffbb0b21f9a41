/* Items to ranks, one after the other, each to the rank with the least so far: a heap of ranks. */
#include "ranks.h"

const char balance_doc[] =
    "balance(costs, ranks, most, chosen)\n--\n\n"
    "Give n items of costs[i] (int64[n], not negative), in the given order, each to the rank of `ranks` with the smallest sum so far, the\n"
    "lowest among equals; no rank takes more than `most`. Writes each item's rank into chosen (int64[n]). Raises TypeError or ValueError\n"
    "before anything is written.";

typedef struct {
    int64_t load;
    size_t rank, items;
} Rank;

static int before(const Rank *one, const Rank *other) {
    return one->load != other->load ? one->load < other->load : one->rank < other->rank;
}

/* Move the first of `count` ranks down to where it belongs. */
static void sift(Rank *heap, size_t count) {
    Rank moved = heap[0];
    size_t place = 0;
    for (size_t child = 1; child < count; child = 2 * place + 1) {
        if (child + 1 < count && before(&heap[child + 1], &heap[child])) child++;
        if (!before(&heap[child], &moved)) break;
        heap[place] = heap[child];
        place = child;
    }
    heap[place] = moved;
}

static void give(const int64_t *costs, size_t count, Rank *heap, size_t ranks, size_t most, int64_t *chosen) {
    for (size_t rank = 0; rank < ranks; rank++) heap[rank] = (Rank){0, rank, 0}; /* which is a heap */
    for (size_t item = 0; item < count; item++) {
        chosen[item] = (int64_t)heap[0].rank;
        heap[0].load += costs[item];
        if (++heap[0].items == most) heap[0] = heap[--ranks];
        sift(heap, ranks);
    }
}

static int costs_fit(const int64_t *costs, size_t count) {
    int64_t total = 0;
    for (size_t item = 0; item < count; item++) {
        if (costs[item] < 0 || costs[item] > INT64_MAX - total) {
            PyErr_Format(PyExc_ValueError, "item %zu of cost %lld is negative or too much in all", item, (long long)costs[item]);
            return 0;
        }
        total += costs[item];
    }
    return 1;
}

PyObject *balance(PyObject *module, PyObject *arguments) {
    (void)module;
    PyObject *given, *target, *result = NULL;
    Py_ssize_t ranks, most;
    Array chosen = {0};
    Rank *heap = NULL;
    size_t count = SIZE_MAX;
    if (!PyArg_ParseTuple(arguments, "OnnO:balance", &given, &ranks, &most, &target)) return NULL;
    int64_t *costs = indices_copied(given, &count, "costs");
    if (costs == NULL) return NULL;
    if (!array_open_as(&chosen, target, 1, INT64, "chosen")) goto done;
    if (chosen.count != count) {
        PyErr_Format(PyExc_ValueError, "chosen has %zu entries, not %zu", chosen.count, count);
        goto done;
    }
    if (ranks < 1 || most < 0 || (count > 0 && (most == 0 || (count - 1) / (size_t)most >= (size_t)ranks))) {
        PyErr_Format(PyExc_ValueError, "%zd ranks of at most %zd have no room for %zu items", ranks, most, count);
        goto done;
    }
    if (!costs_fit(costs, count)) goto done;
    if ((size_t)ranks > SIZE_MAX / sizeof *heap || (heap = PyMem_Malloc((size_t)ranks * sizeof *heap)) == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    give(costs, count, heap, (size_t)ranks, (size_t)most, (int64_t *)chosen.data);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    PyMem_Free(heap);
    PyMem_Free(costs);
    array_close(&chosen);
    return result;
}
